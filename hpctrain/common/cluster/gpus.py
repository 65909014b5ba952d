"""The GPUs of this host, and the best backend for their number."""

from __future__ import annotations

import os
from collections.abc import Mapping


def usable_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """The number of GPUs that this process may use: those of NVML, restricted by CUDA_VISIBLE_DEVICES."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        present: int = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    return min(present, _visible(environment.get("CUDA_VISIBLE_DEVICES"), present))


def _visible(devices: str | None, present: int) -> int:
    """CUDA takes the devices up to the first that is none.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if devices is None:
        return present
    named = [device.strip() for device in devices.split(",")]
    ends = [index for index, device in enumerate(named) if device in ("", "-1")]
    return ends[0] if ends else len(named)


def fitting_backend(framework: str | None, gpus: int, local_ranks: int, host: str) -> tuple[str, str]:
    """The backend of ``auto`` for several ranks that MPI started, and the reason.

    Args:
        framework: ``torch`` or ``keras``; None where it is not known, which Horovod alone serves either way on GPUs.
        gpus: how many the host has that has fewest for its ranks.
    """
    if gpus < local_ranks:
        have = f"{gpus} GPU{'s' * (gpus > 1)} for {local_ranks} ranks" if gpus else "no GPU"
        return "mpi", f"{have} on {host}"
    each = f"a GPU for each rank on {host}"
    if framework == "torch":
        return "nccl", f"PyTorch, {each}"
    return "horovod", f"{'Keras' if framework == 'keras' else 'a script of either framework'}, {each}"
