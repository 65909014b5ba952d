"""What holds for all unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from hpctrain.worker.comm.rank_run import run

# Without Keras, the folder adapters/keras beside the tests of the adapters would do for `import keras`.
if find_spec("tensorflow") is None or find_spec("keras") is None:
    sys.modules["keras"] = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _no_ranks_are_left() -> Iterator[None]:
    """A communicator that a test stood in for has no other ranks for the gradients of the next one."""
    yield
    run.batches = None


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests run side by side, one a core: PyTorch's threads would spin while another test has their core."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
