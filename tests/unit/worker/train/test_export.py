"""The export of a residual network has its running statistics, and needs nothing of hpctrain to be loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hpctrain.common.checkpoints.layout import OWN
from hpctrain.common.checkpoints.pieces import Box, Place
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.common.run.plan import Plan
from hpctrain.control.programs.export import export
from hpctrain.worker import models
from support.divided_arrays import cut, part
from support.small_resnets import small_resnets
from support.written_checkpoints import progress_of, write_checkpoint

LOAD = """
import sys, keras, numpy
model = keras.saving.load_model(sys.argv[1], safe_mode=True)
numpy.save(sys.argv[3], model(numpy.load(sys.argv[2]), training=False))
assert not any(name.startswith("hpctrain") for name in sys.modules)
"""


@pytest.mark.thorough
@small_resnets()
def test_keras(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    from hpctrain.worker.comm.single import SingleCommunicator
    from hpctrain.worker.train.export import export
    from hpctrain.worker.train.keras_trainer import KerasTrainer

    recipe = load_recipe("digits").model_copy(update={"model": ModelSettings(name="resnet18")})
    keras.utils.clear_session()
    trainer = KerasTrainer(recipe, SingleCommunicator("test"))
    random = np.random.default_rng(0)
    for layer in trainer.model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.moving_mean.assign(random.normal(size=layer.moving_mean.shape))
            layer.moving_variance.assign(random.uniform(0.5, 2, size=layer.moving_variance.shape))
    images = random.normal(size=(2, 32, 32, 3)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    expected = np.asarray(trainer.model(images, training=False))
    trained = sum(variable.numpy().size for variable in trainer.model.trainable_variables)
    state = {f"{name}.0" if name.startswith(OWN) else name: value for name, value in trainer.state().items()}
    plan = Plan(recipe=recipe, framework="keras", ranks=1, threads_per_rank=1).model_dump(mode="json")
    path = write_checkpoint(tmp_path, progress_of(1), state, plan=plan)
    keras.utils.clear_session()
    assert export(path, tmp_path / "model.keras") == trained
    arguments = [str(tmp_path / name) for name in ("model.keras", "images.npy", "logits.npy")]
    subprocess.run([sys.executable, "-P", "-c", LOAD, *arguments], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=1e-4, atol=1e-5)
    plain = np.asarray(models.build(ModelSettings(name="resnet18"), "keras")(images, training=False))
    assert not np.allclose(plain, expected, rtol=1e-2)


@pytest.mark.long
def test_a_divided_checkpoint_becomes_one_state_dict(tmp_path: Path) -> None:
    """As a run of three ranks with all arrays in pieces would leave it; a process of its own exports it."""
    torch = pytest.importorskip("torch")
    from hpctrain.worker.comm.single import SingleCommunicator
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    recipe = load_recipe("digits")
    trainer = TorchTrainer(recipe, SingleCommunicator("test"))
    recipe = recipe.model_copy(update={"mesh": Mesh(dp_shard=3)})
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.normal_()
    random = Random(0)
    shares: list[dict[str, np.ndarray]] = [{}, {}, {}]
    for name, array in trainer.state().items():
        if name.startswith(OWN):
            shares[0][f"{name}.0"] = array
            continue
        for box in cut(Box.whole(array.shape), random, 4):
            random.choice(shares)[Place(name, array.shape, box).key] = part(array, box)
    assert sum(" of " in key for share in shares for key in share) > 10
    plan = Plan(recipe=recipe, framework="torch", ranks=3, threads_per_rank=1).model_dump(mode="json")
    path = write_checkpoint(tmp_path, progress_of(1, ranks=3), *shares, plan=plan)
    assert export(path, tmp_path / "model.pt") == sum(each.numel() for each in trainer.model.parameters())
    found, wanted = torch.load(tmp_path / "model.pt", weights_only=True), trainer.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
