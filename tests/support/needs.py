"""What some tests need and a Python may lack: each skips by name what cannot run without it, and nothing else."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

pytorch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch in this Python")
pytorch_2_13 = pytest.mark.skipif(
    find_spec("torch") is None or tuple(map(int, version("torch").split(".")[:2])) < (2, 13),
    reason="needs PyTorch 2.13, whose internals meshes and pipelines follow",
)
both_frameworks = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("tensorflow") is None, reason="needs PyTorch and TensorFlow in this Python"
)
mlflow = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mlflow", "alembic", "sqlalchemy")), reason="needs MLflow in this Python"
)
wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb in this Python")
mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None and not (Path(sys.executable).parent / "mpirun").exists(), reason="needs an mpirun"
)
