"""Brings samples to where PyTorch computes on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray

from hpctrain.common.cluster.gpus import gpu_of
from hpctrain.common.recipes.sections import Images
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.torch_losses import on_device


def rank_device(comm: Communicator) -> torch.device:
    """The device of this rank: each rank has a GPU, or all use the CPU."""
    # Without --share-gpus, NCCL does not let two ranks share a GPU.
    gpus = 0 if comm.in_host_memory else torch.cuda.device_count()
    number = gpu_of(comm.local_rank, comm.local_size, gpus, shared=bool(SHARE_GPUS.read()))
    if number is None:
        return torch.device("cpu")
    device = torch.device("cuda", number)
    # Over Horovod nobody has chosen it yet: page-locked memory and new streams would be those of GPU 0.
    torch.cuda.set_device(device)
    return device


class ImageCopies:
    """Copies on a stream of their own, so that they neither wait for a GPU's kernels nor hold them up.

    Args:
        device: a GPU; on a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, images: NDArray[Any] | torch.Tensor) -> torch.Tensor:
        """Begin to copy images, whose own memory may be written when this returns; what a GPU decoded stays there."""
        tensor = torch.as_tensor(images)
        if self._stream is None or tensor.device.type != "cpu":
            return tensor
        with torch.cuda.stream(self._stream):
            # PyTorch keeps the locked pages until the copy is done.
            return tensor.pin_memory().to(self._device, non_blocking=True)

    def end(self, images: torch.Tensor) -> None:
        """Let what is now given to the GPU wait for the copies that were begun, of which these images are one."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The memory is the other stream's, which may use it again as soon as this one is done with it.
            images.record_stream(current)


class TorchInputs:
    """Copies samples to a device and normalises their images there.

    Attributes:
        copies: those to a GPU; None where samples are computed on as they come.
    """

    def __init__(self, device: torch.device, images: Images) -> None:
        self._device = device
        self.copies = ImageCopies(device) if device.type == "cuda" else None
        self._mean, self._deviation = (
            255 * torch.tensor(values, device=device).view(3, 1, 1) for values in (images.mean, images.deviation)
        )

    def place(self, samples: Samples) -> Samples:
        """The samples, with their images on the way to the device if that is a GPU."""
        if not self.copies:
            return samples
        images: Any = self.copies.begin(samples.images)
        return replace(samples, images=images)

    def tensors(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Images as (N, channels, height, width), the channels innermost in memory, and labels; tokens as they are."""
        # Images that a GPU decoded are there already.
        images, labels = (on_device(values, self._device) for values in (samples.images, samples.labels))
        if self.copies:
            self.copies.end(images)
        if images.dtype == torch.int64:
            return images, labels
        images = images.movedim(-1, 1)
        if images.dtype == torch.uint8:
            images = images.float().sub_(self._mean).div_(self._deviation)
        return images, labels
