"""``python -m hpctrain.worker.train.export CHECKPOINT OUT``: writes a checkpoint's model in its framework's own format.

OUT ends with ``.pt`` for a ``state_dict`` of PyTorch, with ``.safetensors`` for its tensors alone, and with ``.keras``
for a model of Keras. One line of JSON on stdout says how many parameters the model has, or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from hpctrain.common.checkpoints.read import read_state
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.train.trainer import Trainer

if TYPE_CHECKING:
    import keras
    import torch

# The bias of a residual network's last layer, in PyTorch and in Keras.
_HEAD = ("fc.bias", "fc/bias")


def export(checkpoint: Path, out: Path) -> int:
    """Write the complete file or none; returns how many parameters the model has.

    Raises:
        HpctrainError: the checkpoint cannot be read, or the file cannot be written.
    """
    manifest, state = read_state(checkpoint, 0, 1)
    trainer = _trainer(Plan.model_validate_json(json.dumps(manifest.plan)), state)
    try:
        trainer.restore(state)
        trainer.take_average()
    except (KeyError, RuntimeError, ValueError) as error:
        raise HpctrainError(
            "HT-checkpoint-of-other-model",
            "{path} does not belong to the model in its plan: {reason}",
            exit_code=1,
            path=checkpoint,
            reason=str(error),
        ) from error
    part = out.with_name(f".{os.getpid()}.{out.name}")
    try:
        _SAVE[out.suffix](trainer.model, part)  # type: ignore[attr-defined]
        part.replace(out)
    except OSError as error:
        raise disk_error(error, out, "choose another place for it") from error
    finally:
        part.unlink(missing_ok=True)
    return trainer.parameters


def _trainer(plan: Plan, state: Mapping[str, NDArray[Any]]) -> Trainer:
    assert plan.recipe is not None
    recipe, comm = _alone(plan.recipe, state), SingleCommunicator("export")
    if plan.framework == "keras":
        from hpctrain.worker.train.keras_trainer import KerasTrainer

        return KerasTrainer(recipe, comm)
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    return TorchTrainer(recipe, comm)


def _alone(recipe: Recipe, state: Mapping[str, NDArray[Any]]) -> Recipe:
    """The recipe for a single rank, with the classes of the checkpoint.

    Without training, neither the span of batch normalisation nor the mesh matters.
    """
    model: dict[str, object] = {
        "init_from": None,
        "frozen": (),
        "batch_norm": recipe.model.batch_norm.model_copy(update={"span": None}),
    }
    if recipe.data.name == "imagenet":
        model["classes"] = next(
            state[name].size for name in state if name.startswith("model.") and name.endswith(_HEAD)
        )
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=model), "mesh": Mesh()})


def _save_torch(model: torch.nn.Module, out: Path) -> None:
    import torch

    # Cloned, because torch.save writes all of the memory of which a tensor is a view; contiguous from any device.
    plain = torch.contiguous_format
    state = model.state_dict()
    torch.save({name: tensor.detach().cpu().clone(memory_format=plain) for name, tensor in state.items()}, out)


def _save_keras(model: keras.Model, out: Path) -> None:
    import keras

    from hpctrain.worker.models.keras_batch_norm import KerasBatchNorm

    def plain(layer: keras.layers.Layer) -> keras.layers.Layer:
        """Keras' own layer, which does the same outside training and can be loaded without hpctrain."""
        if isinstance(layer, KerasBatchNorm):
            return keras.layers.BatchNormalization.from_config(keras.layers.BatchNormalization.get_config(layer))
        return layer.__class__.from_config(layer.get_config())

    copy = keras.models.clone_model(model, clone_function=plain)
    copy.set_weights(model.get_weights())
    copy.save(out)


def _save_safetensors(model: torch.nn.Module, out: Path) -> None:
    from safetensors.torch import save_file

    # A parameter that two layers share is written once, under the first of its names.
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in values.items()}, out)


_SAVE = {".pt": _save_torch, ".keras": _save_keras, ".safetensors": _save_safetensors}


def _answer(checkpoint: str, out: str) -> dict[str, Any]:
    try:
        return {"parameters": export(Path(checkpoint), Path(out))}
    except HpctrainError as error:
        return {"error": error.record()}


if __name__ == "__main__":
    print(json.dumps(_answer(*sys.argv[1:])))
