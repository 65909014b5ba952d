"""What a step makes of bytes, parts, smoothed labels, broken samples and narrow numbers, in either framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.worker.data import load_digits
from hpctrain.worker.data.samples import BROKEN, Samples
from support.digits_recipes import digits_recipe
from support.small_resnets import small_resnets
from support.trainers import FRAMEWORKS, new_trainer

TRAIN, TEST = load_digits(test_fraction=0.2, seed=0)


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(framework: str, **changes: Any) -> Any:
    return new_trainer(framework, digits_recipe(**changes))


def parameters(trainer: Any) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in trainer.state().items() if name.startswith("model.")}


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], atol: float) -> None:
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=atol, err_msg=name)


def one_step(trainer: Any, samples: Samples, *, parts: int = 1, scale: float | None = None, rate: float = 0.1) -> float:
    pieces = np.array_split(np.arange(len(samples)), parts)
    scale = 1 / len(samples) if scale is None else scale
    return float(trainer.step((samples[piece] for piece in pieces), parts, scale, rate, 1.0))


def logits(trainer: Any, samples: Samples) -> np.ndarray:
    if trainer.framework == "keras":
        return np.asarray(trainer.model(samples.images), np.float64)
    import torch

    with torch.no_grad():
        return trainer.model(torch.from_numpy(samples.images).movedim(-1, 1)).double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_cnn", "resnet18"])
def test_no_network_draws_random_numbers_in_a_step(framework, name):
    """So that checkpoints need no states of generators; a GPT's test is that of text."""
    changes = {} if name == "digits_cnn" else {"model": {"name": name}, "data": {"name": "imagenet"}}
    trainer = make(framework, **changes)
    if framework == "keras":
        assert not [variable.path for variable in trainer.model.variables if "seed" in variable.path]
        return
    import torch

    samples = TRAIN[:4]
    if name == "resnet18":
        samples = Samples(images=np.zeros((4, 32, 32, 3), np.float32), labels=np.arange(4))
    before = torch.get_rng_state()
    one_step(trainer, samples)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long
def test_many_parts_are_one_batch(framework):
    whole, cut = make(framework), make(framework)
    losses = [one_step(whole, TRAIN[:100]), one_step(cut, TRAIN[:100], parts=60)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # What the rate of 0.1 made of the gradients.
    assert_close(parameters(cut), parameters(whole), atol=1e-7)
    # Nothing is left of the sums.
    losses = [one_step(whole, TRAIN[100:150]), one_step(cut, TRAIN[100:150], parts=2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_close(parameters(cut), parameters(whole), atol=1e-6)
    if framework == "keras":
        # One of a part of the batch, and one of the update.
        assert [graph.experimental_get_tracing_count() for graph in cut._graphs.values()] == [1, 1]


@pytest.mark.slow
def test_label_smoothing_is_the_formula_and_for_training_alone(framework):
    trainer, samples, smoothing = make(framework, label_smoothing=0.1), TRAIN[:20], 0.1
    values = logits(trainer, samples)
    log_p = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    own = -log_p[np.arange(20), samples.labels]
    target = smoothing / 10 * np.ones((20, 10))
    target[np.arange(20), samples.labels] += 1 - smoothing
    loss_sum, _ = trainer.evaluate(samples)
    assert loss_sum == pytest.approx(own.sum(), rel=1e-5)
    # The gradient of the mean loss by the last bias is the mean of p - target.
    name = "model.11.bias" if framework == "torch" else next(n for n in reversed(parameters(trainer)) if "bias" in n)
    before = parameters(trainer)[name]
    assert one_step(trainer, samples) == pytest.approx(-(target * log_p).sum() / 20, rel=1e-5)
    gradient = (before - parameters(trainer)[name]) / 0.1
    np.testing.assert_allclose(gradient, (np.exp(log_p) - target).mean(axis=0), atol=1e-5)


@pytest.mark.long
def test_broken_samples_have_no_part(framework):
    images = np.concatenate([TRAIN.images[:9], np.full((3, 8, 8, 1), 7, np.float32)])
    some = Samples(images=images, labels=np.append(TRAIN.labels[:9], [BROKEN] * 3))
    with_broken, without = (make(framework, label_smoothing=0.1) for _ in range(2))
    assert with_broken.evaluate(some) == pytest.approx(without.evaluate(TRAIN[:9]), rel=1e-5)
    losses = one_step(with_broken, some, scale=1 / 12), one_step(without, TRAIN[:9], scale=1 / 12)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_close(parameters(with_broken), parameters(without), atol=1e-7)
    nothing = Samples(images=images, labels=np.full(12, BROKEN))
    before = parameters(with_broken)
    assert one_step(with_broken, nothing) == 0
    assert with_broken.evaluate(nothing) == (0, 0)
    assert_close(parameters(with_broken), before, atol=0)


@pytest.mark.slow
def test_bytes_are_normalised_as_the_recipe_says(framework):
    with small_resnets():
        trainer = make(framework, model={"name": "resnet18"}, data={"name": "imagenet"})
    bytes_ = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    normalised = (bytes_ / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    labels = np.array([3, 500])
    sums = [
        trainer.evaluate(Samples(images=images, labels=labels))[0] for images in (bytes_, normalised.astype(np.float32))
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


@pytest.mark.long
def test_the_share_of_sgd_reaches_the_rule(framework):
    transition = {"center": 5.0, "period": 5.0, "rmsprop_rate": 0.01, "square_decay": 0.99}
    changes = []
    for share in (0.0, 1.0):
        trainer = make(framework, optimizer={"name": "rmsprop_to_sgd", "learning_rate": 0.1, "transition": transition})
        before = parameters(trainer)
        trainer.step([TRAIN[:32]], 1, 1 / 32, 0.1, share)
        after = parameters(trainer)
        changes.append(np.concatenate([(after[name] - before[name]).ravel() for name in before]))
    rmsprop, sgd = changes
    # The first step of RMSprop is as large for all but the smallest gradients: rate x its rate / sqrt(1 - 0.99).
    large = np.abs(sgd) > np.quantile(np.abs(sgd), 0.9)
    np.testing.assert_allclose(rmsprop[large], 0.1 * 0.01 / 0.1 * np.sign(sgd[large]), rtol=0.01)
    plain = make(framework)
    before = parameters(plain)
    one_step(plain, TRAIN[:32])
    after = parameters(plain)
    np.testing.assert_allclose(sgd, np.concatenate([(after[n] - before[n]).ravel() for n in before]), atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_numbers_learn(framework, precision):
    optimizer = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9}
    trainer = make(framework, precision=precision, optimizer=optimizer)
    start = parameters(trainer)
    if precision == "bf16":
        for step in range(40):
            one_step(trainer, TRAIN[np.arange(32 * step, 32 * step + 32)], rate=0.05)
        assert trainer.evaluate(TEST)[1] / len(TEST) > 0.75
    else:
        # Processors compute in fp16 slowly. The scaler may leave out some of the first steps.
        losses = [one_step(trainer, TRAIN[:8], rate=0.05) for _ in range(15)]
        assert losses[-1] < 0.5 * losses[0]
    assert {value.dtype for value in parameters(trainer).values()} == {np.dtype(np.float32)}
    # Rounded to 8 or 11 bits: near the loss of float32, and not equal to it.
    wide = make(framework, optimizer=optimizer)
    for each in (wide, trainer):
        each.restore({**each.state(), **start})
    ours, exact = trainer.evaluate(TEST[:16])[0], wide.evaluate(TEST[:16])[0]
    assert ours != exact and ours == pytest.approx(exact, rel=0.02)


def scale_of(trainer: Any) -> float:
    (value,) = (value for name, value in trainer.state().items() if name.endswith(("scaler.scale", "dynamic_scale")))
    return float(value)


@pytest.mark.long
def test_an_overflow_leaves_the_update_out_and_the_scaler_is_resumed(framework):
    trainer = make(framework, precision="fp16")
    one_step(trainer, TRAIN[:8])
    before, scale = parameters(trainer), scale_of(trainer)
    one_step(trainer, TRAIN[8:16], scale=1e6)
    assert scale_of(trainer) == scale / 2
    assert trainer.updates == 2
    assert_close(parameters(trainer), before, atol=0)
    one_step(trainer, TRAIN[16:24], parts=2)

    again = make(framework, precision="fp16", seed=1)
    again.restore({name: value.copy() for name, value in trainer.state().items()})
    for each in (trainer, again):
        one_step(each, TRAIN[24:32], scale=1e6)
        one_step(each, TRAIN[32:40])
    one, other = trainer.state(), again.state()
    assert one.keys() == other.keys()
    assert {name for name in one if one[name].tobytes() != other[name].tobytes()} == set()
    assert scale_of(again) < scale / 2
    # By which the ranks divide it, each for itself.
    assert one.nbytes == {name: value.nbytes for name, value in one.items()}
