"""What holds for all unit tests."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests run side by side, one a core: PyTorch's threads would spin while another test has their core."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
