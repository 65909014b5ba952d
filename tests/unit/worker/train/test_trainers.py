"""Both trainers against a plain PyTorch loop, written out: the same recipe means the same update."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data import load_digits
from support.digits_recipes import digits_recipe
from support.trainers import FRAMEWORKS, new_trainer

torch = pytest.importorskip("torch")

RATES = [0.02, 0.03, 0.01, 0.005, 0.02, 0.001]
SIZES = [32, 32, 7, 32, 31, 1]


def recipe(optimizer: dict) -> Recipe:
    return digits_recipe(optimizer={"learning_rate": 0.01, **optimizer})


OPTIMIZERS = {
    "sgd": {"name": "sgd"},
    "nesterov": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "clipped": {"name": "sgd", "momentum": 0.9, "clip_norm": 0.5},
    "adam": {"name": "adam", "learning_rate": 0.001},
    "adamw": {"name": "adamw", "learning_rate": 0.001, "weight_decay": 10.0},
}


def plain(name: str, model, parameters):
    settings = OPTIMIZERS[name]
    if settings["name"] == "sgd":
        return torch.optim.SGD(
            parameters,
            momentum=settings.get("momentum", 0.0),
            nesterov=settings.get("nesterov", False),
            weight_decay=settings.get("weight_decay", 0.0),
        )
    if settings["name"] == "adam":
        return torch.optim.Adam(parameters)
    return torch.optim.AdamW(parameters, weight_decay=10.0)


def batches():
    train, _ = load_digits(test_fraction=0.2, seed=0)
    starts = np.cumsum([0, *SIZES])
    return [train[np.arange(start, start + size)] for start, size in zip(starts, SIZES, strict=False)]


def rates(name: str) -> list[float]:
    return [rate / 20 if "adam" in name else rate for rate in RATES]


def reference(name: str, model) -> tuple[list[float], list[np.ndarray]]:
    """Losses and parameters of a loop without this package's trainers."""
    optimizer = plain(name, model, model.parameters())
    losses = []
    for batch, rate in zip(batches(), rates(name), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        images = torch.from_numpy(batch.images.transpose(0, 3, 1, 2).copy())
        loss = torch.nn.functional.cross_entropy(model(images), torch.from_numpy(batch.labels))
        loss.backward()
        if name == "clipped":
            norm = torch.linalg.vector_norm(torch.cat([each.grad.flatten() for each in model.parameters()]))
            for each in model.parameters():
                each.grad *= min(1.0, 0.5 / norm.item())
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().numpy().copy() for parameter in model.parameters()]


def keras_layout(parameters: list[np.ndarray]) -> list[np.ndarray]:
    """PyTorch's parameters as Keras orders their axes."""
    weights = [value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T for value in parameters]
    weights[6] = weights[6].reshape(64, 2, 2, 128).transpose(1, 2, 0, 3).reshape(256, 128)
    return weights


def train(trainer, name: str, micro_batches: int) -> list[float]:
    losses = []
    for batch, rate in zip(batches(), rates(name), strict=True):
        pieces = np.array_split(np.arange(len(batch)), min(micro_batches, len(batch)))
        losses.append(trainer.step([batch[piece] for piece in pieces], len(pieces), 1 / len(batch), rate, 1.0))
    return losses


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pytorch(name, micro_batches):
    from hpctrain.worker import models
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    trainer = TorchTrainer(recipe(OPTIMIZERS[name]), SingleCommunicator("test"))
    torch.manual_seed(0)
    losses, expected = reference(name, models.build(ModelSettings(name="digits_cnn"), "torch"))
    # Training makes more of the rounding of sums in another order, by how much depends on the processor.
    assert train(trainer, name, micro_batches) == pytest.approx(losses, abs=2e-4)
    for parameter, value in zip(trainer.model.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), value, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keras(name):
    pytest.importorskip("keras")
    from hpctrain.worker import models
    from hpctrain.worker.train.keras_trainer import KerasTrainer

    torch.manual_seed(0)
    model = models.build(ModelSettings(name="digits_cnn"), "torch")
    start = keras_layout([parameter.detach().numpy().copy() for parameter in model.parameters()])
    trainer = KerasTrainer(recipe(OPTIMIZERS[name]), SingleCommunicator("test"))
    trainer.model.set_weights(start)
    losses, expected = reference(name, model)
    # Adam makes whole steps of gradients that are mere rounding, and Keras adds epsilon at another place
    loose = "adam" in name
    assert train(trainer, name, micro_batches=3) == pytest.approx(losses, abs=5e-3 if loose else 2e-4)
    for ours, theirs, before in zip(trainer.model.get_weights(), keras_layout(expected), start, strict=True):
        if loose:
            assert np.linalg.norm(ours - theirs) < 0.04 * np.linalg.norm(theirs - before)
        else:
            np.testing.assert_allclose(ours, theirs, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_evaluation_counts_every_sample_once(framework):
    trainer = new_trainer(framework, recipe(OPTIMIZERS["sgd"]))
    _, test = load_digits(test_fraction=0.2, seed=0)
    loss_sum, correct = trainer.evaluate(test)
    one_by_one = [trainer.evaluate(test[index : index + 1]) for index in range(len(test))]
    assert correct == sum(each for _, each in one_by_one)
    assert loss_sum == pytest.approx(sum(loss for loss, _ in one_by_one), rel=1e-5)
    assert {each for _, each in one_by_one} == {0, 1}


def test_what_is_reduced_in_host_memory_is_trained_on_the_cpu_where_there_are_gpus(monkeypatch):
    from hpctrain.worker.comm.mpi import MpiCommunicator
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    class Mpi(SingleCommunicator):
        backend = "mpi"
        in_host_memory = True

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    trainer = TorchTrainer(recipe(OPTIMIZERS["sgd"]), Mpi("test"))
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}
    assert MpiCommunicator.in_host_memory
