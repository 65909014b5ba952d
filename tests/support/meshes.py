"""Meshes for tests."""

from __future__ import annotations

import math

from hpctrain.common.recipes.mesh import Mesh


def mesh(**sizes: int) -> Mesh:
    """A mesh of these sizes alone."""
    return Mesh(**sizes).at(math.prod(sizes.values()))
