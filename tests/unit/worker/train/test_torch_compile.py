"""Compiled networks against the same ones as they are; on a CPU, as a GPU's compiler makes the same graphs."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import InitialWeights
from hpctrain.common.recipes.smoke import smoke
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import Samples
from support.refusals import refused

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters  # noqa: E402

from hpctrain.worker.models.batch_norm import Extent  # noqa: E402
from hpctrain.worker.models.torch_batch_norm import TorchBatchNorm, batch_norms  # noqa: E402
from hpctrain.worker.models.torch_resnet import Basic, ResNet  # noqa: E402
from hpctrain.worker.train.torch_compile import compile_network, is_compiled  # noqa: E402
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402

COMM, CPU = SingleCommunicator("test"), torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path_factory):
    """One for all tests of this file, and nothing that an earlier test has compiled in this process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.compiler.reset()
    counters.clear()


def recipe(name: str, *changes: str) -> Recipe:
    found = load_recipe(name)
    return override_recipe(found if name == "digits" else smoke(found), changes)


def text(count: int, context: int) -> Samples:
    rows = np.random.default_rng(count).integers(0, 257, (count, context + 1))
    return Samples(images=rows[:, :-1], labels=rows[:, 1:])


@pytest.mark.parametrize(
    ("precision", "bound"), [("float32", 1e-6), pytest.param("bf16", 1e-2, marks=pytest.mark.thorough)]
)
@pytest.mark.long
def test_a_gpt_trains_as_without_compiling_with_one_compilation_for_all_blocks(precision, bound):
    small = ["model.layers=3", "model.width=16", "model.heads=2", "model.context=8", f"precision={precision}"]
    losses, states = [], []
    for mode in ("off", "on"):
        trainer = TorchTrainer(recipe("gpt2-124m", *small, f"compile={mode}"), COMM)
        assert trainer.compiled == (mode == "on")
        batch = text(8, 8)
        parts = [batch[part] for part in (np.arange(4), np.arange(4, 8))]
        losses.append([trainer.step(parts, 2, 1 / 8, 1e-3, 1.0) for _ in range(3)])
        losses[-1].append(trainer.evaluate(batch)[0] / 8)
        states.append(trainer.model.state_dict())
    np.testing.assert_allclose(losses[1], losses[0], rtol=bound)
    assert list(states[0]) == list(states[1])
    # A block, and the loss of a chunk.
    assert counters["frames"] == {"total": 2, "ok": 2}
    assert not counters["graph_break"]


@pytest.mark.long
def test_blocks_of_a_residual_network_keep_their_statistics():
    """Ghost batch normalisation in two parts of a step; the averaged statistics are those without compiling."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        norm = partial(TorchBatchNorm, extent=Extent(part=2), momentum=0.8)
        model = ResNet(Basic, (3,), classes=5, zero_gamma=False, weights=InitialWeights(), norm=norm)
        if compiled:
            compile_network(model, recipe("goyal2017", "model.name=resnet18"), COMM)
        images = torch.randn(2, 4, 3, 32, 32)
        for part in range(2):
            for each in batch_norms(model):
                each.begin_part(part + 1, 2)
            model(images[part]).square().sum().backward()
        model.eval()
        found.append([*(each.grad for each in model.parameters()), *model.buffers(), model(images[0]).detach()])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    # The three blocks differ in nothing; parts are not part of the code.
    assert counters["frames"] == {"total": 1, "ok": 1}
    assert not counters["graph_break"]


def test_on_a_cpu_auto_compiles_nothing_and_on_does():
    for mode, compiled in (("auto", False), ("off", False), ("on", True)):
        assert is_compiled(recipe("digits", f"compile={mode}"), COMM, CPU) == compiled


def test_compiled_code_lies_where_nobody_else_can_write(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compile_network(torch.nn.Linear(1, 1), recipe("digits"), COMM)
    folder = tmp_path / f"hpctrain-compiled-{os.getuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o777)
    with refused("HT-cache-not-safe", folder=folder):
        compile_network(torch.nn.Linear(1, 1), recipe("digits"), COMM)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with refused("HT-cache-not-safe", folder=folder):
        compile_network(torch.nn.Linear(1, 1), recipe("digits"), COMM)
