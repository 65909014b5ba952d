"""What a step in PyTorch computes on and gives: samples on a device, mixed images, and the loss on soft labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Images
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.rank_gpus import rank_gpu
from hpctrain.worker.data.mixing import Mixture
from hpctrain.worker.data.samples import NO_LABEL, Samples
from hpctrain.worker.train.torch_chunked_loss import OfLogits, chunk_gradient, chunked_loss, chunked_score


def rank_device(comm: Communicator) -> torch.device:
    """The device of this rank: each rank has a GPU, or all use the CPU. Collective."""
    device = rank_gpu(comm)
    if device is None:
        return torch.device("cpu")
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


def on_device(array: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """An array or a tensor on a device. A copy to a GPU is queued there from page-locked memory, and not waited for."""
    tensor = torch.as_tensor(array)
    if device.type == "cuda" and tensor.device.type == "cpu":
        # PyTorch keeps the locked pages until the copy is done, so that the array's own may be written at once.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def mixed(images: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """The first images of (M, channels, height, width), mixed with others of them."""
    partners = images[on_device(mixture.partners, images.device)]
    own, other = (_along(each, images)[:, None, None, None] for each in (mixture.own, mixture.other))
    top, bottom, left, right = (_along(each, images) for each in mixture.boxes.T)
    rows, columns = (torch.arange(size, device=images.device) for size in images.shape[2:])
    inside = _between(rows, top, bottom)[:, None, :, None] & _between(columns, left, right)[:, None, None, :]
    return torch.where(inside, partners, own * images[: len(partners)] + other * partners)


def _along(values: NDArray[np.float32] | NDArray[np.int64], images: torch.Tensor) -> torch.Tensor:
    return on_device(np.ascontiguousarray(values), images.device)


def _between(places: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Whether low <= place < high, shape (N, places)."""
    return (places >= low[:, None]) & (places < high[:, None])


@dataclass(frozen=True, kw_only=True)
class TorchLoss:
    """A recipe's loss in training.

    Labels are smoothed as PyTorch does it: ``smoothing`` of a label is spread over all classes, its own included.

    Attributes:
        of_logits: what computes a chunk of a loss, as :func:`.torch_chunked_loss.chunk_gradient` does.
    """

    name: str
    smoothing: float
    threshold: float | None
    of_logits: OfLogits = chunk_gradient

    @classmethod
    def of(cls, recipe: Recipe) -> TorchLoss:
        """The loss that a recipe asks for."""
        return cls(name=recipe.loss, smoothing=recipe.label_smoothing, threshold=recipe.target_threshold)

    def sum(self, logits: torch.Tensor, labels: torch.Tensor, mixture: Mixture | None) -> torch.Tensor:
        """The sum over all samples; labels :data:`~hpctrain.worker.data.samples.NO_LABEL` do not count.

        Args:
            logits: float32, shape (N, classes).
            labels: int64, shape (M,): those of the images before mixing.
            mixture: how the images were mixed; None where they were not.
        """
        if mixture is None and self.name == "cross_entropy":
            return F.cross_entropy(
                logits, labels, ignore_index=NO_LABEL, label_smoothing=self.smoothing, reduction="sum"
            )
        targets = _targets(labels, mixture, logits.shape[1])
        known = targets.sum(dim=1, keepdim=True)
        smoothed = (1 - self.smoothing) * targets + self.smoothing / logits.shape[1] * known
        if self.name == "cross_entropy":
            return -(smoothed * F.log_softmax(logits, dim=1)).sum()
        if self.threshold is not None:
            smoothed = (smoothed > self.threshold).to(logits.dtype)
        each = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none").mean(dim=1, keepdim=True)
        return (known * each).sum()

    def of_hidden(self, labels: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The sum of the cross entropy from what the output layer gets, see :func:`chunked_loss`."""
        return chunked_loss(labels, hidden, weight, self.smoothing, self.of_logits)


def _targets(labels: torch.Tensor, mixture: Mixture | None, classes: int) -> torch.Tensor:
    """Each class's share of a label, shape (N, classes); the shares add up to 1 less the share that has none."""
    known = (labels != NO_LABEL)[:, None]
    targets = F.one_hot(labels.clamp(min=0), classes).float() * known
    if mixture is None:
        return targets
    own = _along(mixture.label, targets)[:, None]
    partners = targets[on_device(mixture.partners, labels.device)]
    return own * targets[: len(partners)] + (1 - own) * partners


_COMPUTED_IN = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchForward:
    """What a recipe makes of its network's outputs: the loss in training, and loss and accuracy in validation."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.loss = TorchLoss.of(recipe)
        self._device, self._computed_in = device, _COMPUTED_IN[recipe.precision]
        # The logits of tokens take much more memory than anything else of a batch.
        self._in_chunks = recipe.model.family.predicts_tokens

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context that computes in the recipe's precision."""
        if self._computed_in == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._computed_in)

    def loss_sum(
        self, model: Callable[..., Any], images: torch.Tensor, labels: torch.Tensor, mixture: Mixture | None
    ) -> torch.Tensor:
        """The sum of the losses of all labels, of which there is one dimension."""
        if not self._in_chunks:
            return self.loss.sum(self._logits(model, images), labels, mixture)
        with self.autocast():
            loss_sum: torch.Tensor = model(images, partial(self.loss.of_hidden, labels))
        return loss_sum

    def score(self, model: Callable[..., Any], images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """The sum of the plain losses and the number of correct predictions, each label a part of its sample."""
        each, labels = labels.shape[1:].numel(), labels.flatten()
        if self._in_chunks:
            with self.autocast():
                loss_sum, correct = model(images, partial(chunked_score, labels))
        else:
            logits = self._logits(model, images)
            loss_sum = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
            correct = (logits.argmax(dim=1) == labels).sum()
        return loss_sum.item() / each, int(correct) / each

    def _logits(self, model: Callable[..., Any], images: torch.Tensor) -> torch.Tensor:
        """The logits in float32, whatever they are computed in, one row for each label."""
        with self.autocast():
            logits: torch.Tensor = model(images)
        return logits.flatten(0, -2).float()
