"""The extras of hpctrain's installation, and the errors where one is missing. The login half needs none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from hpctrain.common.errors import HpctrainError

# The modules that each extra brings; pyproject.toml has their packages.
MODULES = {
    "train": ("ml_dtypes", "mpi4py", "sklearn", "tensorboard"),
    "imagenet": ("cv2", "PIL", "simplejpeg", "webdataset"),
    "parquet": ("pyarrow",),
    "text": ("tokenizers",),
    "report": ("matplotlib",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "torch": ("torch",),
    "keras": ("keras", "tensorflow"),
    "lightning": ("lightning",),
    "huggingface": ("accelerate", "transformers"),
}

MLFLOW_SERVER = "MLFLOW_TRACKING_URI"
"""The variable that MLflow's own programs read. An address can hold a password, so no file of a run may contain it."""

# These extras include the extra `train`.
_BRING_TRAIN = {"torch", "keras", "imagenet", "lightning", "huggingface"}


def require(*extras: str) -> None:
    """Make sure that an extra's modules can be imported, without importing them."""
    missing = {extra: [name for name in MODULES[extra] if find_spec(name) is None] for extra in extras}
    if any(missing.values()):
        names = [name for found in missing.values() for name in found]
        raise _error(names, [extra for extra, found in missing.items() if found])


def require_trackers(trackers: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to begin a run whose curves could never reach their tracker.

    A server that does not answer now is no reason to refuse: it may answer later.
    """
    # A tracker without an extra of its own comes with the frameworks.
    require(*(name for name in trackers if name in MODULES))
    if "mlflow" in trackers:
        require_server(environment)


def require_server(environment: Mapping[str, str] = os.environ) -> str:
    """The address of the MLflow server."""
    if address := environment.get(MLFLOW_SERVER):
        return address
    raise HpctrainError(
        "HT-tracking-no-server",
        "tracking: mlflow needs the address of a server",
        f"export {MLFLOW_SERVER}=http://HOST:PORT",
    )


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
