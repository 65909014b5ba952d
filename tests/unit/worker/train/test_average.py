"""Averages of parameters: against torch.optim.swa_utils, and in checkpoints, validation and export."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.common.recipes.augmentation import Averaging
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.data.samples import Samples
from support.digits_recipes import digits_recipe
from support.small_resnets import small_resnets
from support.trainers import new_trainer

torch = pytest.importorskip("torch")
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_resnets():
        yield


def recipe(model: str = "resnet18") -> Recipe:
    data = {"name": "imagenet" if model == "resnet18" else "digits"}
    return digits_recipe(model={"name": model}, data=data, batch={"size": 4}, averaging={"decay": 0.7})


def started(framework: str, model: str = "resnet18"):
    return new_trainer(framework, recipe(model))


def batch(seed: int, count: int = 4, model: str = "resnet18") -> Samples:
    random = np.random.default_rng(seed)
    if model == "digits_cnn":
        return Samples(images=random.random((count, 8, 8, 1), np.float32), labels=random.integers(0, 10, count))
    images = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
    return Samples(images=images, labels=random.integers(0, 1000, count))


def weights(trainer) -> dict[str, np.ndarray]:
    if trainer.framework == "torch":
        return {name: value.detach().numpy().copy() for name, value in trainer.model.state_dict().items()}
    from hpctrain.worker.models.convert import state_of

    return state_of(trainer.model)


def averages(trainer) -> dict[str, np.ndarray]:
    """The model's weights with the average taken, and the trainer left as it was."""
    before = {name: trainer.state()[name].copy() for name in trainer.state()}
    trainer.take_average()
    found = {name: value.copy() for name, value in weights(trainer).items()}
    trainer.restore(before)
    return found


PLAN = [1.0, None, 0.3, 0.3, None, 0.05]


def steps(trainer, plan=PLAN, first: int = 0, model: str = "resnet18") -> None:
    for number, weight in enumerate(plan, start=first):
        trainer.step([batch(number, model=model)], 1, 1 / 4, 0.05, 1.0, weight)


@pytest.mark.slow
def test_torch_averages_have_the_bits_of_torchs_own():
    trainer = started("torch")
    rule = {"decay": 0.0}
    copy = AveragedModel(
        trainer.model, multi_avg_fn=lambda *tensors: get_ema_multi_avg_fn(rule["decay"])(*tensors), use_buffers=True
    )
    for number, weight in enumerate(PLAN):
        trainer.step([batch(number)], 1, 1 / 4, 0.05, 1.0, weight)
        if weight is not None:
            rule["decay"] = 1 - weight
            # 0 makes a copy, as torchvision does in its warm-up
            copy.n_averaged.fill_(0 if weight == 1 else 1)
            copy.update_parameters(trainer.model)
    found = averages(trainer)
    for name, value in copy.module.state_dict().items():
        # torch averages its counters too, and rounds them
        if value.is_floating_point():
            np.testing.assert_array_equal(found[name], value.numpy(), err_msg=name)
    assert not np.array_equal(found["conv1.weight"], weights(trainer)["conv1.weight"])
    # What is validated with is the average.
    copy.module.eval()
    samples = batch(99, 16)
    images = torch.from_numpy(samples.images.transpose(0, 3, 1, 2).astype(np.float32))
    mean, deviation = (
        255 * torch.tensor(each)[:, None, None] for each in (recipe().images.mean, recipe().images.deviation)
    )
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            copy.module((images - mean) / deviation), torch.from_numpy(samples.labels), reduction="sum"
        )
    assert trainer.evaluate(samples)[0] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.long
def test_keras_averages_by_the_same_formula():
    trainer = started("keras")
    expected = weights(trainer)
    for number, weight in enumerate(PLAN):
        steps(trainer, [weight], number)
        now = weights(trainer)
        if weight is not None:
            expected = {name: value + weight * (now[name] - value) for name, value in expected.items()}
    found = averages(trainer)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    samples = batch(99, 16)
    loss = trainer.evaluate(samples)
    trainer.take_average()
    plain = started("keras")
    for variable, value in zip(plain.model.variables, trainer.model.get_weights(), strict=True):
        variable.assign(value)
    plain._average = None
    assert loss[0] == pytest.approx(plain.evaluate(samples)[0], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("framework", "model"), [("torch", "resnet18"), ("keras", "digits_cnn")])
def test_a_training_goes_on_with_the_same_bits_from_its_state(framework, model):
    """And an update that is left out does not enter."""
    whole = started(framework, model)
    steps(whole, model=model)
    before = averages(whole)
    whole.step([batch(7, model=model)], 1, np.nan, 0.05, 1.0, 0.5)
    assert whole.faulty
    after = averages(whole)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    state = {name: whole.state()[name].copy() for name in whole.state()}
    steps(whole, [0.2, 1.0, 0.4], 6, model)
    resumed = started(framework, model)
    steps(resumed, [0.5], 40, model)
    resumed.restore(state)
    steps(resumed, [0.2, 1.0, 0.4], 6, model)
    found = resumed.state()
    assert any(name.startswith("average.") for name in found)
    for name, value in whole.state().items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_the_weights_are_those_of_torchvisions_reference():
    averaging = Averaging(decay=0.99998, every=32, adjusted=True, begin_epoch=5)
    alpha = min(1.0, (1.0 - 0.99998) * (8 * 128 * 32 / 600))
    averaged = 0
    for epoch in range(8):
        for step in range(100):
            found = averaging.weight(epoch=epoch, step=step, batch=1024, epochs=600)
            if step % 32:
                assert found is None
                continue
            assert found == (1.0 if averaged == 0 else pytest.approx(alpha, rel=1e-12))
            averaged += 1
            if epoch < 5:
                averaged = 0
    assert Averaging(decay=0.9).weight(epoch=0, step=0, batch=1, epochs=1) == 1.0
    assert Averaging(decay=0.9).weight(epoch=0, step=1, batch=1, epochs=1) == pytest.approx(0.1)
