"""Copies images to a GPU, and a step's numbers from it, while it computes."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


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


class Reading:
    """Numbers on their way from a device, which nothing that it is given later delays."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if numbers.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> list[float]:
        """The numbers, once they have come."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
