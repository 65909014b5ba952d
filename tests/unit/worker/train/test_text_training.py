"""A step on text: the mean over all labels, whatever the micro-batches, and parameters that have two names."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import NO_LABEL, Samples

torch = pytest.importorskip("torch")

from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402

COMM = SingleCommunicator("test")


def recipe(*overrides: str) -> Recipe:
    small = ["model.layers=2", "model.width=16", "model.context=6", "precision=float32"]
    return override_recipe(smoke(load_recipe("gpt2-124m")), [*small, *overrides])


def samples(count: int) -> Samples:
    rows = np.random.default_rng(count).integers(0, 257, (count, 7))
    return Samples(images=rows[:, :-1], labels=rows[:, 1:])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_is_the_mean_over_all_labels(smoothing):
    trainer = TorchTrainer(recipe(f"label_smoothing={smoothing}"), COMM)
    batch = samples(8)
    logits = trainer.model(torch.from_numpy(batch.images)).transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels), label_smoothing=smoothing)
    before = torch.get_rng_state()
    assert trainer.step([batch], 1, 1 / 8, 1e-3, 1.0) == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


def test_blocks_are_recomputed_by_replicas_too():
    found = []
    for recompute in (False, True):
        trainer = TorchTrainer(recipe(f"sharding.recompute={recompute}"), COMM)
        calls: list[object] = []
        for module in trainer.model.modules():
            if type(module).__name__ == "LayerNorm":
                module.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        loss = trainer.step([samples(4)], 1, 1 / 4, 1e-3, 1.0)
        gradients = [each.grad for each in trainer.model.parameters()]
        found.append((len(calls), loss, gradients))
    (once, *kept), (twice, *again) = found
    # The last norm is no part of a block.
    assert twice == 2 * once - 1
    torch.testing.assert_close(again, kept)


def test_windows_without_labels_have_no_part():
    batch = samples(4)
    labels = batch.labels.copy()
    labels[2:] = NO_LABEL
    gradients = []
    for part in (batch[np.arange(2)], Samples(images=batch.images, labels=labels)):
        trainer = TorchTrainer(recipe(), COMM)
        trainer.step([part], 1, 1 / 4, 0.0, 1.0)
        gradients.append(torch.cat([each.grad.flatten() for each in trainer.model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


def test_evaluation_counts_parts_of_windows():
    trainer = TorchTrainer(recipe(), COMM)
    batch = samples(5)
    loss_sum, correct = trainer.evaluate(batch)
    with torch.no_grad():
        logits = trainer.model(torch.from_numpy(batch.images))
    right = (logits.argmax(-1).numpy() == batch.labels).sum()
    assert correct == pytest.approx(right / 6)
    nearest = logits.argmax(-1).numpy()
    assert trainer.evaluate(Samples(images=batch.images, labels=nearest))[1] == 5
    labels = torch.from_numpy(batch.labels)
    assert loss_sum == pytest.approx(5 * torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels).item())


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_state_goes_into_another_trainer(tied, averaged):
    settings = recipe(f"model.tied={tied}", *(["averaging={decay: 0.5}"] if averaged else []))
    trainer, other = TorchTrainer(settings, COMM), TorchTrainer(settings, COMM)
    trainer.average_weight = 0.5
    trainer.step([samples(4)], 1, 1 / 4, 1e-2, 1.0)
    state = {name: np.array(value) for name, value in trainer.state().items()}
    assert ("model.head.weight" in state) == (tied == "false")
    other.restore(state)
    for each in (trainer, other):
        each.average_weight = 0.5
        each.step([samples(3)], 1, 1 / 3, 1e-2, 1.0)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, other.model.get_parameter(name)), name
    assert (other.model.head.weight is other.model.tokens.weight) == (tied == "true")
    assert trainer.evaluate(samples(4)) == other.evaluate(samples(4))
