"""The first quarter of an hour on a GPU, in the order of what it decides: ``make gpu ONLY=first``.

Each check is bounded, and all bounds together are 12 minutes. What one says is in the report when it ends, also where
it took too long, so that a card that is taken back leaves what was measured. Without a GPU they run at toy sizes, so
that they do not rot.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from hpctrain.worker.adapters.torch.refusals import SINCE_2_13
from support.gpu_runs import (
    BACKEND,
    CARD,
    GPUS,
    PARALLEL,
    TOY,
    differences,
    launch,
    of_make_gpu,
    shards_of_photographs,
    speed,
    start,
)

pytestmark = of_make_gpu

_TOY_TEXT = ("model.layers=2", "model.width=64", "model.heads=2", "model.context=32", "model.vocabulary=512")
_TOY_IMAGES = ("model.name=resnet18", "images.size=32", "compile=off")


def test_pytorch(note):
    """Whether meshes and pipelines run at all with this machine's PyTorch."""
    nccl = torch.cuda.nccl.version() if GPUS else None
    note(torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl, meshes=SINCE_2_13)


@pytest.mark.parametrize(("micro_batch", "logits"), [(12, (25, 29)), (48, (25,))])
def test_chunks_of_the_loss(tmp_path, note, micro_batch, logits):
    """gpt2-124m, and how many logits its output layer should have at once. 90 seconds each."""
    size, toy = (96, ()) if GPUS else (micro_batch, _TOY_TEXT)
    changes = ("data.path=/none", "compile=on", f"batch.size={size}", f"batch.micro_batch={micro_batch}", *toy)
    variants = [f"chunks of 2**{exponent} logits" for exponent in logits]
    speed(tmp_path, note, "gpt2-124m", *changes, variants=variants, seconds=90, rounds=3)


@pytest.mark.parametrize(
    ("batch", "variant", "seconds"), [(256, "each block by itself", 120), (32, "compile=graphs", 100)]
)
def test_graphs_of_a_residual_network(tmp_path, note, batch, variant, seconds):
    """ResNet-50: whether to compile the whole, as it is, or each block; and whether to replay what few images need."""
    batch, toy = (batch, ()) if GPUS else (8, _TOY_IMAGES)
    changes = ("data.path=/none", "precision=bf16", "compile=on", f"batch.per_rank={batch}", *toy)
    variants = (variant,) if GPUS else ()
    speed(
        tmp_path,
        note,
        "goyal2017",
        *changes,
        f"batch.micro_batch={batch}",
        variants=variants,
        seconds=seconds,
        rounds=3,
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return shards_of_photographs(tmp_path_factory.mktemp("photographs"), 1100 if GPUS else 110)


@pytest.mark.parametrize("decode", ["full", "gpu"])
def test_decoding_beside_a_training(tmp_path, note, shards, decode):
    """ResNet-50 from JPEG files, which processes decode, or the GPU. 80 seconds each."""
    if decode == "gpu" and not GPUS:
        pytest.skip("PyTorch sees no GPU")
    batch, toy = (256, ()) if GPUS else (8, _TOY_IMAGES)
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    values = (f"data.path={shards}", f"data.decode={decode}", f"data.workers={workers}", "precision=bf16")
    # Its rate falls after 30 epochs, which such a run does not have.
    length = (f"epochs={16 if GPUS else 1}", "schedule.milestones=[0.5]", "schedule.warmup_epochs=0")
    batches = (f"batch.per_rank={batch}", f"batch.micro_batch={batch}")
    settings = [word for value in (*values, *length, *batches, *toy) for word in ("--set", value)]
    run = ("run", "goyal2017", "--framework", "torch", "-np", "1", *settings, "--run-dir", "run", "--tracking", "none")
    launch(tmp_path, *run, seconds=80, **CARD)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    note(images_a_second=summary["samples_per_s"], data_share=summary["data_share"], workers=workers, remark=TOY)


def test_pipelines_on_one_card(tmp_path, note):
    """Two stages that share it equal one process. NCCL says in the report what it waits for. 120 seconds.

    They are time for two ranks to start and connect, and then for a wait that hpctrain ends after 60 seconds, so that
    what is only slow passes, and what hangs is named.
    """
    if not SINCE_2_13:
        pytest.skip(f"PyTorch {torch.__version__} has no pipelines that hpctrain drives")
    cases = ["pp_1f1b", "pp_gpipe"]
    says = {"HPCTRAIN_TIMEOUT": "60", "NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    arguments = (str(tmp_path / "out"), f"{BACKEND}={','.join(cases)}")
    done = launch(tmp_path, "run", str(PARALLEL), *start(2), "--", *arguments, seconds=120, status=None, **says)
    rows = differences(tmp_path / "out", 2, cases)
    lines = done.stdout.splitlines() if done.returncode else []
    of_nccl = [line for line in lines if " NCCL " in line]
    others = [line for line in lines if " NCCL " not in line]
    note(cases=rows, status=done.returncode, said=others[-40:], nccl_said=of_nccl[-40:])
    assert done.returncode == 0 and len(rows) == len(cases)
    assert not [row for row in rows if not row["largest difference"] <= row["allowed"]]
