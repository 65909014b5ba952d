"""What a training begins with: files with torchvision's names, checkpoints of one's own, and what does not fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.common.run.plan import Plan
from hpctrain.control.programs.export import export
from support.refusals import refused
from support.written_checkpoints import progress_of, write_checkpoint

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from hpctrain.worker import models  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402
from hpctrain.worker.models.pretrained import begin_with  # noqa: E402
from hpctrain.worker.train.torch_finetuning import load_weights  # noqa: E402
from support.documented_resnets import DocumentedResNet, random_statistics  # noqa: E402


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[DocumentedResNet, Path]:
    torch.manual_seed(1)
    model = DocumentedResNet((2, 2, 2, 2), bottleneck=False).eval()
    random_statistics(model)
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file(model.state_dict(), path)
    return model, path


def settings(path: Path, **changes: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": "resnet18", "init_from": str(path), **changes})


def begun(path: Path, **changes: Any) -> nn.Module:
    chosen = settings(path, **changes)
    model = models.build(chosen, "torch").eval()
    load_weights(model, chosen, SingleCommunicator("test"))
    return model


def equal(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(one(images), other(images), rtol=1e-5, atol=1e-5)


def test_a_head_for_other_classes(theirs: tuple[DocumentedResNet, Path], capfd: pytest.CaptureFixture[str]) -> None:
    path = theirs[1]
    torch.manual_seed(7)
    chosen = settings(path, classes=4)
    model = models.build(chosen, "torch")
    drawn = model.fc.weight.detach().clone()
    load_weights(model, chosen, SingleCommunicator("test"))
    assert torch.equal(model.fc.weight, drawn)
    assert torch.equal(model.layer4[1].conv2.weight, theirs[0].layer4[1].conv2.weight)
    said = capfd.readouterr().err
    assert "4 classes" in said and "1,000" in said
    # Of the same classes it is kept, unless a new one is asked for.
    assert torch.equal(begun(path).fc.weight, theirs[0].fc.weight)
    assert not torch.equal(begun(path, new_head=True).fc.weight, theirs[0].fc.weight)
    with refused("HT-weights-of-other-model", missing=[], unexpected=[]) as caught:
        begun(path, classes=4, new_head=False)
    assert [name.partition(" ")[0] for name in caught.value.values["misshaped"]] == ["fc.weight", "fc.bias"]


def test_what_does_not_fit_is_listed(theirs: tuple[DocumentedResNet, Path], tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in theirs[0].state_dict().items()}
    state["layer5.weight"] = state.pop("layer1.0.conv1.weight")
    state["bn1.bias"] = torch.zeros(63)
    save_file(state, tmp_path / "w.safetensors")
    with refused(
        "HT-weights-of-other-model", missing=["layer1.0.conv1.weight"], unexpected=["layer5.weight"]
    ) as caught:
        begun(tmp_path / "w.safetensors", classes=4)
    assert [name.partition(" ")[0] for name in caught.value.values["misshaped"]] == ["bn1.bias"]
    with refused("HT-weights-of-other-model"):
        begun(theirs[1], name="resnet50")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("pickle", "HT-weights-not-usable"),
        ("damaged", "HT-weights-not-usable"),
        ("not there", "HT-file-unreadable"),
        ("pipe", "HT-file-unreadable"),
        ("not finite", "HT-weights-not-usable"),
        ("of integers", "HT-weights-not-usable"),
        ("an empty folder", "HT-weights-not-there"),
    ],
)
def test_files_that_are_refused(theirs: tuple[DocumentedResNet, Path], tmp_path: Path, kind: str, code: str) -> None:
    path = tmp_path / ("w.pth" if kind == "pickle" else "w.safetensors")
    state = {name: value.clone() for name, value in theirs[0].state_dict().items()}
    if kind == "pickle":
        torch.save(state, path)
    elif kind == "damaged":
        path.write_bytes(theirs[1].read_bytes()[:1000])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "an empty folder":
        path.mkdir()
    elif kind != "not there":
        if kind == "not finite":
            state["bn1.weight"][3] = torch.nan
        else:
            state["bn1.weight"] = state["bn1.weight"].long()
        save_file(state, path)
    with refused(code):
        begun(path)


def test_a_checkpoint_its_export_and_back(tmp_path: Path) -> None:
    """Three ways to begin with the same weights: the run, its checkpoint, and the exported file."""
    from hpctrain.worker.comm.single import SingleCommunicator
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    recipe = load_recipe("digits")
    trainer = TorchTrainer(recipe, SingleCommunicator("test"))
    for parameter in trainer.model.parameters():
        parameter.data.normal_()
    state = dict(trainer.state().items())
    plan = Plan(recipe=recipe, framework="torch", ranks=1, threads_per_rank=1).model_dump(mode="json")
    (tmp_path / "checkpoints").mkdir()
    path = write_checkpoint(tmp_path / "checkpoints", progress_of(1), state, plan=plan)
    out = tmp_path / "model.safetensors"
    assert export(path, out) == trainer.parameters
    assert load_file(out).keys() == trainer.model.state_dict().keys()
    for source in (tmp_path, path, out):
        model = begun(source, name="digits_cnn")
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
    keras_plan = {**plan, "framework": "keras"}
    other = write_checkpoint(tmp_path, progress_of(1), state, plan=keras_plan)
    with refused("HT-only-in-pytorch", framework="keras"):
        begun(other, name="digits_cnn")


@pytest.mark.slow
def test_keras_begins_with_the_same(theirs: tuple[DocumentedResNet, Path]) -> None:
    pytest.importorskip("keras")
    from hpctrain.worker.models.convert import load_state, state_of

    chosen = settings(theirs[1], classes=4)
    model = models.build(chosen, "keras")
    drawn = state_of(model)
    arrays, _ = begin_with(chosen, {name: array.shape for name, array in drawn.items()})
    load_state(model, drawn | arrays)
    assert {*drawn} - {*arrays} == {"fc.weight", "fc.bias"}
    torch_model = begun(theirs[1], classes=4)
    torch_model.load_state_dict(
        {name: torch.from_numpy(array) for name, array in state_of(model).items()}, strict=False
    )

    def keras_logits(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(model(images.movedim(1, -1).numpy(), training=False).numpy())

    equal(torch_model, keras_logits)
