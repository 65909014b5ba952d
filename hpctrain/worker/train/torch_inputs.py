"""Brings samples to where PyTorch computes on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

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


class TorchInputs:
    """Copies samples to a device and normalises their images there.

    A GPU's copies are on a stream of their own, so that they neither wait for its kernels nor hold them up.

    Attributes:
        copies: whether samples are copied to a GPU; otherwise they are computed on as they come.
    """

    def __init__(self, device: torch.device, images: Images) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copies = self._stream is not None
        self._mean, self._deviation = (
            255 * torch.tensor(values, device=device).view(3, 1, 1) for values in (images.mean, images.deviation)
        )

    def place(self, samples: Samples) -> Samples:
        """The samples, with their images on the way to the device if that is a GPU; what it decoded is there already.

        The memory of the images that were given may be written when this returns.
        """
        tensor = torch.as_tensor(samples.images)
        if self._stream is None or tensor.device.type != "cpu":
            return samples
        with torch.cuda.stream(self._stream):
            # PyTorch keeps the locked pages until the copy is done.
            images: Any = tensor.pin_memory().to(self._device, non_blocking=True)
        return replace(samples, images=images)

    def tensors(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Images as (N, channels, height, width), the channels innermost in memory, and labels; tokens as they are."""
        images, labels = (on_device(values, self._device) for values in (samples.images, samples.labels))
        if self._stream is not None:
            # What is now given to the GPU waits for the copies that were begun.
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The memory is the other stream's, which may use it again as soon as this one is done with it.
            images.record_stream(current)
        if images.dtype == torch.int64:
            return images, labels
        images = images.movedim(-1, 1)
        if images.dtype == torch.uint8:
            images = images.float().sub_(self._mean).div_(self._deviation)
        return images, labels
