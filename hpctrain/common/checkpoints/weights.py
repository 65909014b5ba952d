"""Weights that a training begins with: the model of a checkpoint, or of a file of safetensors, by PyTorch's names here.

Residual networks have torchvision's names, and timm's are the same (https://github.com/pytorch/vision,
https://github.com/huggingface/pytorch-image-models), so that their files need no table of names. Files may be
anybody's: they are read as safetensors alone, never as pickles, and an array only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.common.checkpoints.find import newest_whole, require_whole
from hpctrain.common.checkpoints.layout import MANIFEST, STATISTICS, checkpoint_path
from hpctrain.common.checkpoints.read import read_state, shape_of
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular
from hpctrain.common.run.directory import RunDirectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MODEL, _AVERAGE, _AVERAGE_STATISTICS = "model.", "average.", f"{STATISTICS}average."
# What wrappers put before every name: DistributedDataParallel, Lightning, torch.compile.
_WRAPPERS = ("module.", "model.", "_orig_mod.")
_FLOATS = {"F16", "F32", "F64"}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Arrays that can be read, by name; their shapes are known before."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], NDArray[Any]]


def open_weights(path: Path) -> Weights:
    """The weights in a run directory, a checkpoint or a file."""
    return _checkpoint(path) if path.is_dir() else _file(path)


def _file(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors":
        raise HpctrainError(
            "HT-weights-not-usable",
            "model.init_from: {path} is no run directory, no checkpoint and no .safetensors file",
            "hpctrain checkpoint export RUN_DIR OUT.safetensors writes one; pickles (.pt, .pth) are not read, since "
            "they can run programs",
            path=path,
        )
    try:
        # A pipe or a device is refused, not waited for.
        open_regular(path).close()
        file: Any = safe_open(path, framework="np")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise read_error(error, path, "name weights that can be read: --set model.init_from=PATH") from error
    except SafetensorError as error:
        raise HpctrainError(
            "HT-weights-not-usable",
            "{path} is no whole file of safetensors: {reason}",
            "write or download it again",
            path=path,
            reason=str(error),
        ) from error
    prefix = next((each for each in _WRAPPERS if slices and all(name.startswith(each) for name in slices)), "")
    shapes = {name.removeprefix(prefix): tuple(each.get_shape()) for name, each in slices.items()}

    def read(name: str) -> NDArray[Any]:
        kind = slices[f"{prefix}{name}"].get_dtype()
        if kind not in _FLOATS:
            raise HpctrainError(
                "HT-weights-not-usable",
                "{path}: {name} is of type {type}",
                "write the file in float32",
                path=path,
                name=name,
                type=kind,
            )
        array: NDArray[Any] = file.get_tensor(f"{prefix}{name}")
        return array

    return Weights(shapes=shapes, read=read)


def _checkpoint(path: Path) -> Weights:
    """A checkpoint's model, or that of a run's newest one; what was validated, where the run averaged its weights."""
    if not (path / MANIFEST).is_file():
        folder = RunDirectory(path).checkpoints
        newest = newest_whole(folder).iteration
        if not newest:
            raise HpctrainError(
                "HT-weights-not-there",
                "model.init_from: {path} is no checkpoint, and no run directory with a whole one",
                "hpctrain checkpoint list RUN_DIR shows a run's",
                path=path,
            )
        path = checkpoint_path(folder, newest)
    else:
        require_whole(path)
    manifest, state = read_state(path, 0, 1)
    framework = manifest.plan.get("framework")
    if framework != "torch":
        raise HpctrainError(
            "HT-only-in-pytorch",
            "{path} is of a training in {framework}, and weights are taken from PyTorch's",
            "train with --framework torch, or name a .safetensors file",
            path=path,
            framework=str(framework),
        )
    kept: dict[str, str] = {}
    # The later ones replace the earlier.
    for prefix in (_MODEL, STATISTICS, _AVERAGE, _AVERAGE_STATISTICS):
        kept |= {name.removeprefix(prefix): name for name in state if name.startswith(prefix)}
    # Those of the averages begin with the prefix of the others.
    kept = {name: key for name, key in kept.items() if not name.startswith(_AVERAGE)}
    return Weights(
        shapes={name: shape_of(state, key) if key in state.shapes else state[key].shape for name, key in kept.items()},
        read=lambda name: state[kept[name]],
    )
