"""What only GPUs show: engines over NCCL, narrow types, compiled and replayed steps, energy, binding.

Without a GPU one training runs on the CPU, so that its program does not rot. `make gpu` runs this by itself and writes
a report.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.common.run.events import read_events
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.horovod.cuda import find_toolkit
from support.gpu_runs import GPUS, launch, on_gpus
from support.interrupted_runs import assert_same_bits, interrupted
from support.small_imagenet import write_images

PROGRAMS = Path(__file__).with_name("programs")
DEVICE = "cuda" if GPUS else "cpu"

# How far the losses of the same batches may be apart: another order of adding up in this type. In 16 bits the shares of
# eight ranks, added up by one process on a CPU, were 7.5e-3 apart from the whole batch.
_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}


def run(
    folder: Path,
    program: str,
    options: dict[str, object],
    *,
    backend: str,
    ranks: int,
    places: tuple[str, ...] = ("--oversubscribe",),
    seconds: float = 300,
) -> dict:
    """What a program found, run by `hpctrain run` on ranks of this machine."""
    start = ["run", str(PROGRAMS / program), "-np", str(ranks), *places, "--backend", backend]
    launch(folder, *start, "--run-dir", "run", "--", "out.json", json.dumps(options), seconds=seconds)
    found: dict = json.loads((folder / "out.json").read_text())
    return found


@functools.cache
def alone(precision: str, device: str) -> list[float]:
    """The losses of one process of plain PyTorch on the whole batches."""
    options = json.dumps({"alone": True, "precision": precision, "device": device})
    command = [sys.executable, str(PROGRAMS / "steps.py"), "/dev/stdout", options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    losses: list[float] = json.loads(done.stdout)["losses"]
    return losses


def compare(folder: Path, note, *, backend: str, ranks: int, precision: str, **more: Any) -> dict:
    """Train with and without hpctrain, and compare the losses; ``more`` is for :func:`run`, or for the program."""
    options = {name: more.pop(name) for name in ("compile", "graphs") if name in more}
    chosen = {"precision": precision, "device": DEVICE, **options}
    found = run(folder, "steps.py", chosen, backend=backend, ranks=ranks, **more)
    assert (found["ranks"], found["backend"]) == (ranks, backend)
    assert found["device"].startswith(DEVICE)
    expected, losses = np.array(alone(precision, DEVICE)), np.array(found["losses"])
    apart = float(np.max(np.abs(losses / expected - 1)))
    note(backend=backend, ranks=ranks, largest_relative_difference_of_a_loss=apart, last_loss=losses[-1])
    assert expected[-1] < expected[0] / 2, "the network learns, so that a wrong gradient shows"
    assert apart < _TOLERANCE[precision]
    return found


@pytest.mark.parametrize("precision", ["float64", *(["float32", "bf16", "fp16"] if GPUS else [])])
@pytest.mark.long
def test_losses_are_those_of_one_process(tmp_path, note, precision):
    """Over NCCL with a rank a GPU; over Gloo where there is none."""
    compare(tmp_path, note, backend="nccl" if GPUS else "gloo", ranks=GPUS or 2, precision=precision)


# What torch.compile calls reduce-overhead records CUDA graphs by itself.
_WAYS: dict[str, dict[str, object]] = {
    "compiled": {"compile": "default"},
    "compiled with CUDA graphs": {"compile": "reduce-overhead"},
    "replayed": {"graphs": True},
}


@on_gpus
@pytest.mark.parametrize("way", _WAYS)
def test_steps_that_are_compiled_or_replayed(tmp_path, note, way):
    compare(tmp_path, note, backend="nccl", ranks=GPUS, precision="float32", **_WAYS[way])


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A small ImageNet: 99 images to train on and 11 for validation."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_images(folder / "images", images=110, classes=10, size=80, broken=4)
    launch(folder, "data", "shard", "images", "shards")
    return folder / "shards"


# Each has something that no other here has: an optimizer, a loss, a way to mix or to average.
@on_gpus
@pytest.mark.parametrize(
    "recipe",
    [
        *("goyal2017", "you2017-lars@8192", "lamb", "akiba2017", "nvidia-dle", "mlperf-resnet50@3264"),
        *("torchvision-v2", "rsb2021@A3", "ffcv-rn50@16"),
    ],
)
def test_published_recipes_made_small(tmp_path, note, shards, recipe):
    """The first losses on a GPU are those on the CPU, in float32; later ones drift apart where a recipe learns fast.

    On CPUs, sums in another order change them by 2e-5 of themselves, other samples by 5e-2 and more.
    """
    small = ("model.name=resnet18", "images.size=32", "images.test_resize=37", "images.test_size=32", "data.limit=32")
    chosen = (f"data.path={shards}", "data.workers=1", "precision=float32", *small)
    settings = [word for each in chosen for word in ("--set", each)]
    losses = {}
    for backend in ("nccl", "mpi"):
        start = ["run", recipe, "--smoke", "-np", str(GPUS), "--oversubscribe", "--framework", "torch"]
        launch(tmp_path, *start, "--backend", backend, *settings, "--run-dir", backend, NVIDIA_TF32_OVERRIDE="0")
        events = read_events(tmp_path / backend / "events.jsonl")
        losses[backend] = [event.loss for event in events if event.event == "step"]
    note(nccl=losses["nccl"], cpu=losses["mpi"])
    assert len(losses["nccl"]) == len(losses["mpi"]) >= 2
    assert all(map(math.isfinite, losses["nccl"]))
    assert losses["nccl"][:2] == pytest.approx(losses["mpi"][:2], rel=1e-3)


@on_gpus
def test_a_gpt_resumes_to_the_same_bits(tmp_path, note):
    """In bf16 with its optimizer's state and the GPU's random numbers; asked to stop, and gone on with."""
    settings = [word for each in ("precision=bf16", "model.layers=2") for word in ("--set", each)]
    start = ["gpt2-124m", "--smoke", "-np", str(GPUS), "--backend", "nccl", *settings]
    launch(tmp_path, "run", *start, "--run-dir", "whole")
    status, output = interrupted(tmp_path, 5, start, lambda pid: (tmp_path / "run" / "stop").touch())
    note(status=status, said=output.splitlines()[-3:])
    assert status == RESUMABLE, output
    launch(tmp_path, "run", "--resume", "--run-dir", "run")
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


@on_gpus
def test_mpi_takes_gradients_through_the_cpus_memory(tmp_path, note):
    """Two ranks, which share a GPU where there is one, so that this shows two ranks on any machine."""
    compare(tmp_path, note, backend="mpi", ranks=max(2, GPUS), precision="float64")


@on_gpus
def test_horovod_built_for_this_machine(tmp_path, note):
    """With CUDA and NCCL where they are: compiled, if no such build is cached, and proved on two ranks."""
    if find_toolkit() is None:
        pytest.skip("no nvcc on the PATH, and no CUDA_HOME that has one")
    built = launch(tmp_path, "horovod", "build", seconds=540).stdout.splitlines()[-1]
    note(build=built)
    # It is built for the CPU's memory too, where NCCL's header is not found.
    assert "NCCL" in built
    compare(tmp_path, note, backend="horovod", ranks=GPUS, precision="float64")


@on_gpus
def test_a_parameter_that_one_rank_changed_is_noticed(tmp_path, note):
    """The guard's checksums are computed on the GPU."""
    ranks = max(2, GPUS)
    backend = "nccl" if GPUS > 1 else "mpi"
    options = {"precision": "float32", "device": "cuda", "corrupt": True}
    start = ["run", str(PROGRAMS / "steps.py"), "-np", str(ranks), "--oversubscribe", "--backend", backend]
    command = [sys.executable, "-m", "hpctrain", *start, "--", "out.json", json.dumps(options)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    note(said=[line for line in done.stderr.splitlines() if "differ" in line][:1])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0.weight" in done.stderr


@on_gpus
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_digits(tmp_path, note, precision):
    """The recipe to its end, with the energy that the GPUs' own counters give."""
    start = ["run", "digits", "-np", str(GPUS), "--framework", "torch", "--backend", "nccl"]
    launch(tmp_path, *start, "--set", f"precision={precision}", "--run-dir", "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    accuracy = summary["metrics"]["test_accuracy"]
    note(accuracy=accuracy, samples_per_s=summary["samples_per_s"])
    assert (summary["status"], summary["backend"]) == ("done", "nccl")
    # The floor of the recipe's page.
    assert accuracy >= 0.975
    joules = [
        host.joules.get("gpu", 0.0)
        for event in read_events(tmp_path / "run" / "events.jsonl")
        if event.event == "energy"
        for host in event.hosts.values()
    ]
    note(gpu_joules=max(joules, default=0.0))
    assert max(joules, default=0.0) > 0


@on_gpus
def test_ranks_have_gpus_and_cores_of_their_own_next_to_each_other(tmp_path, note):
    """As the node map of this machine places them."""
    cores = os.sched_getaffinity(0)
    if len(cores) < GPUS:
        pytest.skip(f"{len(cores)} cores for {GPUS} ranks")
    start = {"backend": "nccl", "ranks": GPUS, "places": ("--node", "live")}
    found = compare(tmp_path, note, precision="float32", **start)
    note(cores=found["cores"], gpus=found["gpus"])
    assert sum(map(len, found["cores"])) == len({core for own in found["cores"] for core in own}), "ranks share cores"
    assert len(set(found["gpus"])) == GPUS, "ranks share a GPU"
    near = [_cores_near(gpu) & cores for gpu in found["gpus"]]
    note(cores_near_the_gpus=[sorted(each) for each in near])
    for own, allowed in zip(found["cores"], near, strict=True):
        # A container or job may have no core next to its GPU.
        assert not allowed or set(own) <= allowed, "a rank runs on cores that are far from its GPU"


def _cores_near(uuid: str) -> set[int]:
    """Of the GPU that PyTorch calls so. CUDA's numbers are not NVML's, which has no CUDA_VISIBLE_DEVICES.

    Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlAffinity.html.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        words = pynvml.nvmlDeviceGetCpuAffinity(gpu, math.ceil(os.cpu_count() / 64))
    finally:
        pynvml.nvmlShutdown()
    return {64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1}


@on_gpus
def test_doctor(tmp_path, note):
    """It reads what is there; what it finds wrong with this machine is in the report."""
    command = [sys.executable, "-m", "hpctrain", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 3), done.stderr
    checks = json.loads(done.stdout)["checks"]
    note(**{check["name"]: f"{check['status']}: {check['found']}" for check in checks})
    assert [check["status"] for check in checks if check["name"] == "GPUs of each rank"] == ["ok"]
