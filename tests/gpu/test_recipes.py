"""The speed of recipes on a GPU, as ratios to plain compiled PyTorch on the same network in the same process.

On a machine without a GPU at toy sizes, whose figures mean nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.gpu_runs import GPUS, execute, launch, of_make_gpu
from support.pages import ROOT
from support.small_imagenet import write_images

pytestmark = of_make_gpu

PROGRAM = Path(__file__).with_name("programs") / "recipe_speed.py"
_TOY = "" if GPUS else "toy sizes on a CPU: the figures mean nothing"
_CARD = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]} if GPUS else {}
_IMAGES = ("data.path=/none", "precision=bf16", "compile=on")
_SMALL_IMAGES = ("model.name=resnet18", "images.size=32")
_SMALL_TEXT = ("model.layers=2", "model.width=64", "model.heads=2", "model.context=32", "model.vocabulary=512")


def speed(folder: Path, note: Any, recipe: str, *changes: str, seconds: float = 240) -> dict[str, float]:
    """Samples or tokens a second of the recipe's step and of a plain loop; their ratios."""
    options: dict[str, Any] = {"recipe": recipe, "set": changes, "compile": bool(GPUS)}
    options |= {"rounds": 5, "together": 5} if GPUS else {"rounds": 2, "together": 1}
    command = [sys.executable, str(PROGRAM), "out.json", json.dumps(options)]
    execute(command, folder, seconds=seconds, OMP_NUM_THREADS="1", **_CARD)
    found = json.loads((folder / "out.json").read_text())
    rates: dict[str, float] = found["rates"]
    note(set=" ".join(changes), a_second=rates, to_plain=rates["recipe"] / rates["plain"], remark=_TOY)
    note(peak_bytes=found["peak_bytes"])
    note(waits_for_the_gpu_in_a_step=found["waits"])
    assert all(rate > 0 for rate in rates.values())
    # The losses and the norm of the gradients, read together; by an event, where the update comes before, none is seen.
    assert found["waits"] in ((0, 1) if GPUS else (None,))
    return rates


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Photographs of 500 x 375, as ImageNet's are on average; a tenth of them for validation."""
    folder = tmp_path_factory.mktemp("photographs")
    images, size = (2200, 500) if GPUS else (110, 80)
    write_images(folder / "images", images=images, classes=10, size=size)
    launch(folder, "data", "shard", "images", "shards")
    return folder / "shards"


@pytest.mark.parametrize("name", ["goyal2017", "you2017-lars@256", "lamb"])
def test_images(tmp_path, note, shards, name):
    """ResNet-50, 256 images in bfloat16: the step by itself, and the whole run from JPEG shards."""
    batch = 256 if GPUS else 8
    size = "per_rank" if name == "goyal2017" else "size"
    # On a CPU, to compile the kinds of a network's blocks would take minutes; those of a GPT are one.
    small = () if GPUS else (*_SMALL_IMAGES, "compile=off")
    changes = (*_IMAGES, f"batch.{size}={batch}", f"batch.micro_batch={batch}", *small)
    rates = speed(tmp_path, note, name, *changes)
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    whole = [f"data.path={shards}", *changes[1:], f"data.workers={workers}", f"epochs={8 if GPUS else 1}"]
    if name == "goyal2017":
        # Its rate falls after 30 epochs, which such a run does not have.
        whole += ["schedule.milestones=[0.5]", "schedule.warmup_epochs=0"]
    settings = [word for each in whole for word in ("--set", each)]
    start = ("run", name, "--framework", "torch", "-np", "1", *settings, "--run-dir", "run", "--tracking", "none")
    launch(tmp_path, *start, seconds=120, **_CARD)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rate = summary["samples_per_s"]
    note(from_shards=rate, workers=workers, data_share=summary["data_share"])
    if rate:
        note(from_shards_to_plain=rate / rates["plain"])


@pytest.mark.parametrize("micro_batch", [12, 48])
def test_text(tmp_path, note, micro_batch):
    """gpt2-124m with so many windows of 1,024 tokens at once, of a batch of 96."""
    size, small = (96, ()) if GPUS else (micro_batch, _SMALL_TEXT)
    changes = ("data.path=/none", "compile=on", f"batch.size={size}", f"batch.micro_batch={micro_batch}", *small)
    speed(tmp_path, note, "gpt2-124m", *changes)


def test_a_gpt_of_a_billion_parameters(tmp_path, note):
    """24 layers of width 2,048, with and without recomputation: tokens a second, MFU, peak memory and the predicted."""
    sizes = {"layers": 24, "width": 2048, "heads": 16} if GPUS else {"layers": 2, "width": 64, "heads": 2}
    sizes |= {} if GPUS else {"context": 32, "vocabulary": 512}
    device, batch = ("cuda", 8) if GPUS else ("cpu", 2)
    program = (
        "import json, one_gpu\n"
        "from hpctrain.common.recipes.gpt import GptSettings\n"
        f"settings = GptSettings(**{sizes!r})\n"
        "rows = []\n"
        "for recompute in (False, True):\n"
        "    rows.append(one_gpu.large_gpt("
        f"settings, {batch}, recompute=recompute, rounds=3, device={device!r}))\n"
        "    one_gpu.empty()\n"
        "print(json.dumps(rows))\n"
    )
    benchmarks = f"{ROOT / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = execute([sys.executable, "-c", program], tmp_path, seconds=200, PYTHONPATH=benchmarks, **_CARD)
    rows = json.loads(done.stdout.splitlines()[-1])
    note(steps=rows, remark=_TOY)
    assert [row["recomputation"] for row in rows] == [False, True]
    assert all(row["tokens_per_s"] > 0 and row["predicted_bytes"] > 0 for row in rows)
    if GPUS:
        assert rows[1]["peak_bytes"] < rows[0]["peak_bytes"]
