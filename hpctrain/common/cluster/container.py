"""The container of the ranks: its image, its runtime, and the parts of the host that are mounted."""

from __future__ import annotations

from typing import Literal

from hpctrain.common.frozen import FrozenModel

Runtime = Literal["apptainer", "pyxis"]


class Container(FrozenModel):
    """A container image.

    Attributes:
        runtime: ``apptainer`` wraps each rank's command; ``pyxis`` is a plugin of srun, which then starts the ranks.
        image: a file, or an address that the runtime knows (``docker://…``, ``nvcr.io#nvidia/…``).
        mounts: ``SOURCE[:TARGET[:OPTIONS]]`` each. The run directory is always there.
    """

    runtime: Runtime
    image: str
    mounts: tuple[str, ...] = ()
