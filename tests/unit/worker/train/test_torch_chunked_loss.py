"""The loss of an output layer in chunks against PyTorch's on the logits of all rows."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.common.recipes import loss_chunks
from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.loss_chunks import chunk_rows
from hpctrain.common.recipes.smoke import smoke
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import NO_LABEL, Samples

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hpctrain.worker.train.torch_chunked_loss import (  # noqa: E402
    chunk_gradient,
    chunked_loss,
    chunked_score,
)
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402

ROWS, WIDTH, CLASSES = 100, 16, 97
# Of PyTorch's gradient, the norm of the difference. In 16 bits both are rounded, in different places.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


class Largest(TorchDispatchMode):
    """The most numbers that a tensor made by an operation has."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return made


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(loss_chunks, "_LOGITS", 15 * CLASSES)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 20, WIDTH), torch.randn(CLASSES, WIDTH) / 4
    labels = torch.randint(CLASSES, (ROWS,))
    labels[::7] = NO_LABEL
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def gradients(loss, hidden, weight):
    """Of an uneven factor, as the chunks' own gradients are those of the sum."""
    return torch.autograd.grad(loss / 3, (hidden, weight))


def whole_loss(labels, hidden, weight, smoothing=0.0):
    logits = torch.nn.functional.linear(hidden, weight).flatten(0, -2).float()
    return torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=NO_LABEL, label_smoothing=smoothing, reduction="sum"
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("computed_in", TOLERANCE, ids=str)
def test_chunks_have_the_loss_and_the_gradients_of_all_rows(layer, computed_in, smoothing):
    hidden, weight, labels = layer
    with torch.autocast("cpu", computed_in, enabled=computed_in != torch.float32):
        found = chunked_loss(labels, hidden, weight, smoothing)
        expected = whole_loss(labels, hidden, weight, smoothing)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6 if computed_in == torch.float32 else 1e-5)
    for own, other in zip(gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert own.dtype == other.dtype
        assert (own - other).norm() <= TOLERANCE[computed_in] * other.norm()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("computed_in", [*TOLERANCE, torch.float64], ids=str)
def test_a_compiled_chunk_has_the_same_loss_and_gradient(computed_in, smoothing):
    """Traced as for a GPU, where labels are compared and not scattered."""
    torch.manual_seed(0)
    logits, labels = torch.randn(ROWS, CLASSES).to(computed_in), torch.randint(CLASSES, (ROWS,))
    labels[::7] = NO_LABEL
    compiled = torch.compile(chunk_gradient, dynamic=False, backend="aot_eager", fullgraph=True)
    for own, other in zip(
        compiled(logits.clone(), labels, smoothing), chunk_gradient(logits.clone(), labels, smoothing), strict=True
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("rows", "on_gpu", "size"),
    # Twelve and forty-eight windows of GPT-2; ones that no even number of chunks divides; and a small batch.
    [(12288, True, 2048), (49152, True, 6144), (12000, True, 2560), (1000, True, 1024), (12288, False, 647)],
)
def test_chunks_on_a_gpu_are_few_and_fill_its_tiles(monkeypatch, rows, on_gpu, size):
    monkeypatch.undo()
    assert chunk_rows(rows, 50304, on_gpu=on_gpu) == size
    assert not on_gpu or (size % 256 == 0 and -(-rows // size) <= 8)


def test_a_score_is_that_of_all_rows(layer):
    hidden, weight, labels = layer
    logits = torch.nn.functional.linear(hidden, weight).flatten(0, -2)
    labels[:30] = logits[:30].argmax(dim=1)
    loss, correct = chunked_score(labels, hidden, weight)
    assert loss.item() == pytest.approx(whole_loss(labels, hidden, weight).item(), rel=1e-6)
    assert correct.item() == (logits.argmax(dim=1) == labels).sum().item() >= 30
    assert not loss.requires_grad


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_gpt_never_has_the_logits_of_all_its_tokens(precision):
    recipe = override_recipe(smoke(load_recipe("gpt2-124m")), ["model.layers=1", f"precision={precision}"])
    trainer = TorchTrainer(recipe, SingleCommunicator("test"))
    context, classes = recipe.model.context, recipe.model.vocabulary
    rows = np.random.default_rng(0).integers(0, 257, (16, context + 1))
    batch = Samples(images=rows[:, :-1], labels=rows[:, 1:])
    for compute in (lambda: trainer.step([batch], 1, 1 / 16, 1e-3, 1.0), lambda: trainer.evaluate(batch)):
        with Largest() as largest:
            compute()
        assert largest.numbers < 16 * context * classes
    with Largest() as largest:
        trainer.model(torch.from_numpy(batch.images))
    assert largest.numbers >= 16 * context * classes
