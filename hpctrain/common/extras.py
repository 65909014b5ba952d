"""The extras of hpctrain's installation, and the errors where one is missing. The login half needs none."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from hpctrain.common.errors import HpctrainError

# The modules that each extra brings; pyproject.toml has their packages.
MODULES = {
    "train": ("ml_dtypes", "mpi4py", "safetensors", "sklearn", "tensorboard"),
    "imagenet": ("cv2", "PIL", "scipy", "simplejpeg", "webdataset"),
    "parquet": ("pyarrow",),
    "text": ("tokenizers",),
    "objects": ("fsspec", "s3fs", "tenacity"),
    "report": ("matplotlib",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "torch": ("torch",),
    "keras": ("keras", "tensorflow"),
    "lightning": ("lightning",),
    "huggingface": ("accelerate", "transformers"),
}

# These extras include the extra `train`.
_BRING_TRAIN = {"torch", "keras", "imagenet", "lightning", "huggingface"}


def require(*extras: str) -> None:
    """Make sure that an extra's modules can be imported, without importing them.

    Raises:
        HpctrainError: one cannot.
    """
    missing = {extra: [name for name in MODULES[extra] if find_spec(name) is None] for extra in extras}
    if any(missing.values()):
        names = [name for found in missing.values() for name in found]
        raise _error(names, [extra for extra, found in missing.items() if found])


def missing_extra(error: ModuleNotFoundError) -> HpctrainError | None:
    """The error for a failed import; None if no extra has that module."""
    extra = next((extra for extra, modules in MODULES.items() if error.name in modules), None)
    return None if extra is None else _error([str(error.name)], [extra])


def _error(modules: Sequence[str], extras: Sequence[str]) -> HpctrainError:
    verb = "is" if len(modules) == 1 else "are"
    named = [extra for extra in extras if extra != "train" or not _BRING_TRAIN & {*extras}]
    install = f"pip install 'hpctrain[{','.join(named)}]'"
    return HpctrainError(
        "HT-package-not-installed",
        "{modules} {verb} not installed in this Python",
        install,
        modules=", ".join(modules),
        verb=verb,
    )
