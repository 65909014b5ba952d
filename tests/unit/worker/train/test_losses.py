"""Losses on soft labels in both frameworks: against PyTorch's own, written out for dense labels."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.common.recipes.augmentation import Mixing
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker.data.mixing import Mixer, Mixture, piece
from hpctrain.worker.data.samples import BROKEN, Samples
from support.digits_recipes import digits_recipe
from support.trainers import FRAMEWORKS, new_trainer

torch = pytest.importorskip("torch")
F = torch.nn.functional

LABELS = np.array([0, 4, 4, 2, 1, 3, 0, 2])
LOSSES = {
    "cross_entropy": {},
    "smoothed": {"label_smoothing": 0.1},
    "binary": {"loss": "binary_cross_entropy"},
    "binary_smoothed": {"loss": "binary_cross_entropy", "label_smoothing": 0.1},
    "thresholded": {"loss": "binary_cross_entropy", "target_threshold": 0.2},
    "smoothed_thresholded": {"loss": "binary_cross_entropy", "label_smoothing": 0.1, "target_threshold": 0.2},
}


def recipe(**values: object) -> Recipe:
    base = {"batch": {"size": 8}, "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9}}
    return digits_recipe(**{**base, **values})


def mixture(seed: int = 0, group: int | None = None) -> Mixture:
    return Mixer(Mixing(mixup=1.0, cutmix=1.0), seed).mixture(piece(np.arange(8), 8, group), 0, 0, 8, 8)


def total(framework: str, plan: Recipe, logits: np.ndarray, labels: np.ndarray, mixed: Mixture | None) -> float:
    if framework == "torch":
        from hpctrain.worker.train.torch_losses import TorchLoss

        return float(TorchLoss.of(plan).sum(torch.from_numpy(logits), torch.from_numpy(labels), mixed))
    tf = pytest.importorskip("tensorflow")
    from hpctrain.worker.train.keras_losses import KerasLoss, tensors

    found = KerasLoss.of(plan).sum(tf.constant(logits), tf.constant(labels), tensors(mixed) if mixed else None)
    return float(found)


def expected(values: dict, logits: np.ndarray, labels: np.ndarray, mixed: Mixture | None) -> float:
    """PyTorch's own on dense labels in float64; timm's targets where binary."""
    hot = torch.eye(5, dtype=torch.float64)[torch.from_numpy(labels)]
    if mixed:
        lam = torch.from_numpy(mixed.label).double()[:, None]
        hot = lam * hot + (1 - lam) * hot.roll(1, 0)
    outputs, smoothing = torch.from_numpy(logits).double(), values.get("label_smoothing", 0.0)
    if "loss" not in values:
        return float(F.cross_entropy(outputs, hot, label_smoothing=smoothing, reduction="sum"))
    targets = hot * (1 - smoothing) + smoothing / 5
    if "target_threshold" in values:
        targets = targets.gt(values["target_threshold"]).double()
    return float(F.binary_cross_entropy_with_logits(outputs, targets) * len(labels))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mixes", [False, True])
def test_losses_are_pytorchs_on_dense_labels(framework, name, mixes):
    random = np.random.default_rng(2)
    for seed in range(4):
        logits = random.normal(0, 3, (8, 5)).astype(np.float32)
        mixed = mixture(seed) if mixes else None
        found = total(framework, recipe(**LOSSES[name]), logits, LABELS, mixed)
        assert found == pytest.approx(expected(LOSSES[name], logits, LABELS, mixed), rel=2e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["cross_entropy", "smoothed"])
def test_of_a_broken_image_only_its_own_part_is_missing(framework, name):
    logits = np.random.default_rng(3).normal(size=(8, 5)).astype(np.float32)
    mixed = mixture(1)
    labels = LABELS.copy()
    labels[2] = BROKEN
    plan = recipe(**LOSSES[name])
    lam = float(mixed.label[2])
    # The plain losses of image 2 with its own label, and of image 3, which it is mixed into, with image 2's.
    each = F.cross_entropy(
        torch.from_numpy(logits[[2, 3]]),
        torch.from_numpy(LABELS[[2, 2]]),
        label_smoothing=plan.label_smoothing,
        reduction="none",
    )
    missing = lam * each[0] + (1 - float(mixed.label[3])) * each[1]
    whole = total(framework, plan, logits, LABELS, mixed)
    assert total(framework, plan, logits, labels, mixed) == pytest.approx(whole - float(missing), rel=1e-5)
    assert total(framework, plan, logits, np.full(8, BROKEN), mixed) == 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_binary_loss_weighs_a_sample_by_what_is_known_of_its_label(framework):
    logits = np.random.default_rng(3).normal(size=(8, 5)).astype(np.float32)
    labels = np.where(np.arange(8) == 5, BROKEN, LABELS)
    for values in (LOSSES["binary"], LOSSES["thresholded"]):
        targets = torch.eye(5)[torch.from_numpy(np.maximum(labels, 0))]
        each = F.binary_cross_entropy_with_logits(torch.from_numpy(logits), targets, reduction="none").mean(1)
        assert total(framework, recipe(**values), logits, labels, None) == pytest.approx(
            float(each.sum() - each[5]), rel=1e-5
        )


def started(framework: str, plan: Recipe, state: dict[str, np.ndarray]):
    trainer = new_trainer(framework, plan)
    if framework == "torch":
        trainer.model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in state.items()})
    else:
        from hpctrain.worker.models.convert import load_state

        load_state(trainer.model, state)
    return trainer


def weights(trainer) -> dict[str, np.ndarray]:
    if trainer.framework == "torch":
        return {name: value.detach().numpy() for name, value in trainer.model.state_dict().items()}
    from hpctrain.worker.models.convert import state_of

    return state_of(trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("parts", [1, 3])
def test_trainers_take_steps_on_mixed_images(framework, parts):
    """Against a loop in PyTorch that mixes whole batches, the third sample broken."""
    from hpctrain.worker.models import build

    plan = recipe(mixing={"mixup": 1.0, "cutmix": 1.0, "group": 5}, label_smoothing=0.1)
    torch.manual_seed(5)
    plain = build(ModelSettings(name="digits_cnn"), "torch")
    trainer = started(framework, plan, {name: value.numpy().copy() for name, value in plain.state_dict().items()})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    random = np.random.default_rng(9)
    mixer = Mixer(plan.mixing, plan.seed)
    for step in range(4):
        images = random.random((8, 8, 8, 1), np.float32)
        labels = random.integers(0, 10, 8)
        whole = mixer.mixture(piece(np.arange(8), 8, 5), 0, 8 * step, 8, 8)

        def part(positions, images=images, labels=labels, step=step):
            cutout = piece(positions, 8, 5)
            return Samples(
                images=images[cutout.positions],
                labels=labels[cutout.positions],
                mixture=mixer.mixture(cutout, 0, 8 * step, 8, 8),
            )

        found = trainer.step(map(part, np.array_split(np.arange(8), parts)), parts, 1 / 8, 0.1, 1.0)

        hot = torch.eye(10)[torch.from_numpy(labels)]
        rows = []
        targets = []
        for i, j in enumerate(whole.partners):
            top, bottom, left, right = whole.boxes[i]
            row = whole.own[i] * images[i] + whole.other[i] * images[j]
            row[top:bottom, left:right] = images[j, top:bottom, left:right]
            rows.append(row)
            targets.append(float(whole.label[i]) * hot[i] + (1 - float(whole.label[i])) * hot[j])
        optimizer.zero_grad()
        batch = torch.from_numpy(np.stack(rows).transpose(0, 3, 1, 2).copy())
        loss = F.cross_entropy(plain(batch), torch.stack(targets), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-5)
    after = weights(trainer)
    for name, value in plain.state_dict().items():
        np.testing.assert_allclose(after[name], value.numpy(), atol=2e-6, err_msg=name)
