"""Fine-tuning against a loop in plain PyTorch, written out: parts that stand still, rates by part, a new last layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import Samples
from support.digits_recipes import digits_recipe
from support.refusals import refused

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from hpctrain.worker.train.torch_finetuning import freeze, rate_factors  # noqa: E402
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402
from support.documented_resnets import DocumentedResNet, random_statistics  # noqa: E402

RATES = [0.02, 0.03, 0.01, 0.02]
FROZEN = ("conv1", "bn1", "layer1", "layer2")
OPTIMIZER = {
    "name": "sgd",
    "learning_rate": 0.01,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.01,
    "rates": {"layer3": 0.1, "layer*": 0.5},
}


def recipe(path: Path, **model: Any) -> Recipe:
    values = {"name": "resnet18", "classes": 4, "init_from": str(path), "frozen": FROZEN, **model}
    return digits_recipe(model=values, optimizer=OPTIMIZER)


def batches() -> list[Samples]:
    random = np.random.default_rng(0)
    return [
        Samples(
            images=random.normal(size=(8, 32, 32, 3)).astype(np.float32),
            labels=random.integers(0, 4, 8).astype(np.int64),
        )
        for _ in RATES
    ]


def step(trainer: TorchTrainer, number: int, parts: int = 1) -> float:
    batch = batches()[number]
    pieces = np.array_split(np.arange(len(batch)), parts)
    return trainer.step([batch[piece] for piece in pieces], parts, 1 / len(batch), RATES[number], 1.0)


def plain_losses(model: DocumentedResNet) -> list[float]:
    """What people write: frozen parameters without gradients, their normalisations in eval, groups of rates."""
    frozen = [getattr(model, name) for name in FROZEN]
    for module in frozen:
        module.requires_grad_(False)
    factors = [(model.layer3, 0.1), (model.layer4, 0.5), (model.fc, 1.0)]
    optimizer = torch.optim.SGD(
        [{"params": [*module.parameters()]} for module, _ in factors],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.01,
    )
    losses = []
    for batch, rate in zip(batches(), RATES, strict=True):
        model.train()
        for module in frozen:
            module.eval()
        for group, (_, factor) in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        images = torch.from_numpy(batch.images).permute(0, 3, 1, 2)
        loss = torch.nn.functional.cross_entropy(model(images), torch.from_numpy(batch.labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_against_a_loop_in_plain_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = DocumentedResNet((2, 2, 2, 2), bottleneck=False, classes=7)
    random_statistics(plain)
    path = tmp_path / "given.safetensors"
    save_file(plain.state_dict(), path)
    trainer = TorchTrainer(recipe(path), SingleCommunicator("test"))
    plain.fc = torch.nn.Linear(512, 4)
    plain.fc.load_state_dict(trainer.model.fc.state_dict())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    losses = plain_losses(plain)
    ours = [step(trainer, number) for number in range(2)]
    # A second trainer goes on from its state: without the file, which is needed at the beginning alone.
    path.unlink()
    resumed = TorchTrainer(recipe(path).begun(), SingleCommunicator("test"))
    state = dict(trainer.state().items())
    resumed.restore(state)
    ours += [step(resumed, number) for number in (2, 3)]
    assert ours == pytest.approx(losses, abs=1e-4)
    after, theirs = resumed.model.state_dict(), plain.state_dict()
    for name, value in after.items():
        still = name.startswith(FROZEN)
        assert torch.equal(value, before[name]) == still or name.endswith("num_batches_tracked"), name
        if value.is_floating_point():
            torch.testing.assert_close(value, theirs[name], atol=1e-4, rtol=1e-4)
    # Validated alike: statistics of what stands still are the given ones.
    samples = batches()[0]
    plain.eval()
    with torch.no_grad():
        logits = plain(torch.from_numpy(samples.images).permute(0, 3, 1, 2))
    labels = torch.from_numpy(samples.labels)
    loss, correct = resumed.evaluate(samples)
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    assert (loss, correct) == (pytest.approx(wanted, abs=1e-3), int((logits.argmax(1) == labels).sum()))
    kept = {name.split(".")[1] for name in state if name.startswith("optimizer.")}
    assert kept == {"layer3", "layer4", "fc"}


def test_patterns(tmp_path: Path) -> None:
    model = DocumentedResNet((1, 1, 1, 1), bottleneck=False)
    still = freeze(model, ["bn1", "layer[12].*", "*.bias"])
    assert {name for name, each in model.named_modules() if each in still} == {
        "bn1",
        "layer1.0.bn1",
        "layer1.0.bn2",
        "layer2.0.bn1",
        "layer2.0.bn2",
        "layer2.0.downsample.1",
    }
    factors = rate_factors(model, {"layer3.0.conv1": 0.5, "layer3": 0.25, "fc.weight": 2.0})
    assert factors["layer3.0.conv1.weight"] == 0.5
    assert factors["layer3.0.conv2.weight"] == 0.25
    assert (factors["fc.weight"], factors["conv1.weight"]) == (2.0, 1.0)
    assert "fc.bias" not in factors
    for rates in ({"layer5": 0.1}, {"layer1": 0.1}, {"*": 0.5, "fc": 0.1}):
        with refused("HT-tuning-pattern-not-valid", key="optimizer.rates", pattern=[*rates][-1]):
            rate_factors(model, rates)
    with refused("HT-tuning-pattern-not-valid", key="model.frozen", pattern="layr1"):
        freeze(model, ["layr1"])
    with refused("HT-tuning-pattern-not-valid") as caught:
        freeze(model, ["*"])
    assert "nothing is trained" in caught.value.message


def test_a_new_last_layer_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "given.safetensors"
    save_file(DocumentedResNet((2, 2, 2, 2), bottleneck=False, classes=4).state_dict(), path)
    frozen = ("layer1", "fc")
    TorchTrainer(recipe(path, frozen=frozen), SingleCommunicator("test"))
    for drawn in ({"new_head": True}, {"classes": 5}):
        with refused("HT-tuning-pattern-not-valid", pattern="fc", name="fc.weight"):
            TorchTrainer(recipe(path, frozen=frozen, **drawn), SingleCommunicator("test"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.new_head=true"],
        ["model.frozen=[layer1]", "mesh.dp_shard=2"],
        ["optimizer.rates={fc: 2}", "mesh.dp_shard=2"],
        ["model.init_from=run", "mesh.dp_shard=2"],
    ],
)
def test_keys_that_do_not_go_together(overrides: list[str]) -> None:
    with refused("HT-keys-not-together"):
        load_recipe("goyal2017", overrides)
