"""Compiled networks against the same ones as they are; on a CPU, as a GPU's compiler makes the same graphs."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

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

from functorch.compile import make_boxed_func  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from hpctrain.worker.models.batch_norm import Extent  # noqa: E402
from hpctrain.worker.models.torch_batch_norm import TorchBatchNorm, batch_norms  # noqa: E402
from hpctrain.worker.models.torch_resnet import Basic, ResNet  # noqa: E402
from hpctrain.worker.train.torch_compile import compile_network, is_compiled  # noqa: E402
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402

COMM, CPU = SingleCommunicator("test"), torch.device("cpu")
RANKS = SimpleNamespace(size=2, local_size=2)
_COMPILE = torch.compile


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


class Replayed:
    """A compiler whose code overwrites what it returned in the step before, as replayed CUDA graphs do.

    A step ends for it, as for PyTorch, when each forward pass has had its backward pass.
    """

    def __init__(self) -> None:
        self.modes: list[str | None] = []
        self._returned: list[torch.Tensor] = []
        self._open = 0

    def compile(self, function, mode=None, **settings):
        """What torch.compile is replaced by."""
        self.modes.append(mode)
        code = aot_autograd(fw_compiler=partial(self._code, 1), bw_compiler=partial(self._code, -1))
        return _COMPILE(function, backend=code if mode == "reduce-overhead" else "eager", **settings)

    def _code(self, change, graph, _):
        def run(*inputs):
            if not self._open:
                for each in self._returned:
                    each.fill_(torch.nan)
                self._returned = []
            outputs = graph(*inputs)
            given = {each.untyped_storage().data_ptr() for each in inputs if torch.is_tensor(each)}
            tensors = [each for each in outputs if torch.is_tensor(each) and each.is_floating_point()]
            # Other tensors on the same memory: autograd keeps a gradient as it is if nothing else holds it.
            self._returned += [each.detach() for each in tensors if each.untyped_storage().data_ptr() not in given]
            self._open += change
            return outputs

        return make_boxed_func(run)


def images(count: int) -> Samples:
    random = np.random.default_rng(count)
    return Samples(
        images=random.integers(256, size=(count, 32, 32, 3), dtype=np.uint8), labels=random.integers(10, size=count)
    )


_SMALL_GPT = ("gpt2-124m", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8")
_SMALL_RESNET = ("goyal2017", "model.name=resnet18", "images.size=32")


@pytest.mark.long
@pytest.mark.parametrize(
    ("small", "batch", "graphs"), [(_SMALL_GPT, text(8, 8), 2), (_SMALL_RESNET, images(8), 1)], ids=["gpt", "resnet"]
)
def test_nothing_of_a_step_is_read_once_a_graph_of_the_next_runs(monkeypatch, small, batch, graphs):
    """Two micro-batches add their gradients; the averaged statistics and the losses are those without compiling."""
    losses, states = [], []
    for mode in ("off", "graphs"):
        replayed = Replayed()
        monkeypatch.setattr(torch, "compile", replayed.compile)
        trainer = TorchTrainer(recipe(*small, f"compile={mode}"), COMM)
        parts = [batch[part] for part in (np.arange(4), np.arange(4, 8))]
        losses.append([trainer.step(parts, 2, 1 / 8, 1e-2, 1.0) for _ in range(3)])
        states.append(trainer.model.state_dict())
    assert replayed.modes.count("reduce-overhead") == graphs
    assert not counters["graph_break"]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_blocks_of_a_residual_network_keep_their_statistics():
    """Ghost batch normalisation in two parts of a step; the averaged statistics are those without compiling."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        norm = partial(TorchBatchNorm, extent=Extent(part=2), momentum=0.8)
        model = ResNet(Basic, (3,), classes=5, zero_gamma=False, weights=InitialWeights(), norm=norm)
        if compiled:
            compile_network(model, recipe("goyal2017", "model.name=resnet18"), RANKS)
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


def test_what_is_frozen_is_compiled_once_for_all_parts_of_a_step(monkeypatch):
    graphs = []
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    )
    trainer = TorchTrainer(recipe(*_SMALL_RESNET, "compile=on", "model.frozen=[conv1,bn1,layer1]"), COMM)
    trainer.step([images(2) for _ in range(4)], 4, 1 / 8, 1e-2, 1.0)
    assert len(graphs) == 1


def test_blocks_of_several_sizes_are_compiled_for_known_sizes(monkeypatch):
    """They share their code, for which PyTorch's default is symbolic sizes from the second on."""
    graphs = []

    def keep(graph, inputs):
        graphs.append([each for each in inputs if isinstance(each, torch.SymInt)])
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    norm = partial(TorchBatchNorm, extent=Extent(part=4), momentum=0.8)
    model = ResNet(Basic, (1, 1, 1), classes=5, zero_gamma=False, weights=InitialWeights(), norm=norm)
    compile_network(model, recipe("goyal2017", "model.name=resnet18"), RANKS)
    for size in (32, 64):
        model(torch.randn(4, 3, size, size))
    assert len(graphs) >= 6
    assert not any(graphs)


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
