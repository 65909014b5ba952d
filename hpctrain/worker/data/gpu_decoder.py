"""Decodes photographs on a rank's GPU with nvJPEG, through torchvision, and cuts and resizes them there in batches.

Which part of a photograph is cut is drawn as in the workers of :mod:`hpctrain.worker.data.image_loader`, from the same
random numbers; the pixels differ a little, by decoder and filter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import simplejpeg
import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.decoding import END, BrokenImageError, decode
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.rank_gpus import rank_gpu
from hpctrain.worker.data.decoder import Cut, Decoder, LoadedPiece
from hpctrain.worker.data.image_loader import WorkerPool
from hpctrain.worker.data.sampling import Indices

# Decodes JPEG files to a device, each to uint8 of shape (3, height, width); RuntimeError if it cannot decode one.
DecodeAll = Callable[[Sequence[bytes | memoryview], torch.device], Sequence[torch.Tensor]]

# The most pixels, of photographs filled up to the largest of them, that are decoded and resized together.
_MOST_TOGETHER = 1 << 26
# The most processes that read, which is 40 to 80 microseconds a photograph: two are faster than a GPU decodes.
_READERS = 2


def by_nvjpeg(contents: Sequence[bytes | memoryview], device: torch.device) -> Sequence[torch.Tensor]:
    """Decode JPEG files on a GPU, in colour."""
    from torchvision.io import ImageReadMode, decode_jpeg

    # PyTorch wants memory that can be written, such as that which workers share.
    files = [torch.frombuffer(bytearray(file) if type(file) is bytes else file, dtype=torch.uint8) for file in contents]
    decoded: list[torch.Tensor] = decode_jpeg(files, ImageReadMode.RGB, device)
    return decoded


def cannot_decode(problem: str, hint: str = "") -> HpctrainError:
    """The error where GPUs are to decode and cannot; the hint says what comes before another setting."""
    hint = f"{hint}--set data.decode=scaled"
    return HpctrainError("HT-decode-gpu-fails", "data.decode: gpu, but {problem}", hint, problem=problem)


def require_card(comm: Communicator | None) -> torch.device:
    """The GPU that decodes for this rank: that of its trainer. Collective.

    Raises:
        HpctrainError: there is none, or torchvision is missing or decodes nothing there.
    """
    if comm:
        card = rank_gpu(comm)
    else:
        card = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    if card is None:
        problem = f"this rank trains on no GPU (backend {comm.backend if comm else 'single'})"
        raise cannot_decode(problem, "--backend nccl, where PyTorch sees a GPU for each rank; or ")
    install = "install the torchvision that belongs to this PyTorch, built for CUDA; or "
    try:
        by_nvjpeg([simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8))], card)
    except Exception as error:
        raise cannot_decode(f"torchvision decodes no photograph on {card}: {error}", install) from error
    return card


class CardPool(WorkerPool):
    """Makes images on a GPU, as tensors there, from photographs that workers read, or that it reads if there are none.

    A thread makes one piece ahead, on a stream of the GPU's own. Photographs that are no ordinary JPEG files, that are
    cut short or that nvJPEG cannot decode are decoded by the processor: the same ones are broken.

    Args:
        folder: what ``hpctrain data shard`` wrote.
        device: a GPU, or the processor in tests.
    """

    def __init__(self, folder: Path, recipe: Recipe, device: torch.device, decode_all: DecodeAll = by_nvjpeg) -> None:
        super().__init__(folder, recipe)
        self.job = replace(self.job, only_reads=True)
        self._count = min(self._count, _READERS)
        self._device, self._decode_all = device, decode_all
        self._on_card = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stream(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        unread = (LoadedPiece(indices=indices, images=None) for indices in pieces)
        read = super().stream(decoder, split, pieces, epoch) if self._count else unread
        with ThreadPoolExecutor(1, "decoding", initializer=self._choose_card) as thread, contextlib.closing(read):
            made: LoadedPiece | None = None
            for piece in read:
                coming = thread.submit(self._made, decoder, split, piece, epoch)
                if made:
                    yield made
                # Waited for before the workers read another piece into the memory of this one.
                made = self._taken(coming)
            if made:
                yield made

    def _choose_card(self) -> None:
        """A new thread uses the first GPU, of which each rank would take memory, where nothing else is said."""
        if self._on_card:
            torch.cuda.set_device(self._device)

    def _taken(self, coming: Future[LoadedPiece]) -> LoadedPiece:
        piece = coming.result()
        if self._on_card:
            # The memory is the other stream's, which may use it again as soon as this one is done with it.
            piece.images.record_stream(torch.cuda.current_stream(self._device))
        return piece

    def _made(self, decoder: Decoder, split: str, piece: LoadedPiece, epoch: int) -> LoadedPiece:
        shape = (len(piece.indices), *self.job.shape(split, epoch))
        with torch.cuda.stream(self._on_card), torch.no_grad():
            images = torch.empty(shape, dtype=torch.uint8, device=self._device)
            for together in _together(piece.cuts or list(decoder.cuts(piece.indices, epoch))):
                first, photographs = together[0].position, self._photographs(decoder, together)
                images[first : first + len(together)] = resized(photographs, together, shape[1])
                if self._on_card:
                    # torchvision decodes the next on a stream of its own, into memory that this one may still read.
                    self._on_card.synchronize()
        return LoadedPiece(indices=piece.indices, images=images)

    def _photographs(self, decoder: Decoder, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        """Each photograph as uint8 of shape (3, height, width)."""
        # nvJPEG may fill up what is cut short.
        decoded = self._decoded([cut for cut in cuts if cut.header.pixels is None and cut.content[-2:] == END])
        return [
            decoded[cut.position]
            if cut.position in decoded and decoded[cut.position].shape[1:] == (cut.header.height, cut.header.width)
            else self._by_processor(decoder, cut)
            for cut in cuts
        ]

    def _decoded(self, cuts: Sequence[Cut]) -> dict[int, torch.Tensor]:
        """The photographs that nvJPEG can decode, by position."""
        try:
            found = self._decode_all([cut.content for cut in cuts], self._device) if cuts else []
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            half = len(cuts) // 2
            return self._decoded(cuts[:half]) | self._decoded(cuts[half:]) if half else {}
        return {cut.position: photograph for cut, photograph in zip(cuts, found, strict=True)}

    def _by_processor(self, decoder: Decoder, cut: Cut) -> torch.Tensor:
        header = cut.header
        try:
            pixels = decode(bytes(cut.content), header.width, header.height) if header.pixels is None else header.pixels
        except BrokenImageError as error:
            raise decoder.broken(cut.sample, error) from error
        return torch.from_numpy(np.array(pixels)).to(self._device).permute(2, 0, 1)


def _together(cuts: Sequence[Cut]) -> Iterator[list[Cut]]:
    """The photographs in groups that fit into memory, decoded, and cut and filled up to one size."""
    group: list[Cut] = []
    tall = wide = 0
    for cut in cuts:
        tall, wide = max(tall, cut.header.height), max(wide, cut.header.width)
        if group and (len(group) + 1) * tall * wide > _MOST_TOGETHER:
            yield group
            group, tall, wide = [], cut.header.height, cut.header.width
        group.append(cut)
    if group:
        yield group


def resized(photographs: Sequence[torch.Tensor], cuts: Sequence[Cut], size: int) -> torch.Tensor:
    """The middle of each resized crop, of shape (N, size, size, 3).

    Pillow's bilinear filter, antialiased where the crop shrinks: a product with a matrix for each of rows and columns,
    as all crops, which differ in size, then are one product of matrices.
    """
    crops = [cut.crop for cut in cuts]
    device = photographs[0].device
    # Bytes and weights in 16 bits are precise to a fifth of a level; processors compute faster in 32.
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    tall, wide = max(crop.height for crop in crops), max(crop.width for crop in crops)
    padded = torch.zeros((len(cuts), 3, tall, wide), dtype=dtype, device=device)
    places = [place[:, : crop.height, : crop.width] for place, crop in zip(padded, crops, strict=True)]
    parts = [
        photograph[:, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        for photograph, crop in zip(photographs, crops, strict=True)
    ]
    # One call, in which other threads of Python run.
    torch._foreach_copy_(places, parts)
    # One copy, which the driver takes over before it returns.
    sides = [[cut.crop.height, cut.height, cut.crop.width, cut.width, cut.flip] for cut in cuts]
    on_card = torch.tensor(sides, device="cpu").to(device, non_blocking=True)
    high, shown_high, broad, shown_broad, flips = on_card.T
    rows, columns = weights(high, shown_high, size, tall), weights(broad, shown_broad, size, wide)
    columns = torch.where(flips[:, None, None] > 0, columns.flip(1), columns)
    found = rows.to(dtype)[:, None] @ padded @ columns.to(dtype).transpose(1, 2)[:, None]
    return found.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def weights(lengths: torch.Tensor, sizes: torch.Tensor, shown: int, longest: int) -> torch.Tensor:
    """The share of each pixel of a side in each of the ``shown`` middle pixels, of shape (N, shown, longest).

    Args:
        lengths: the pixels of each side, ``longest`` at most.
        sizes: those that it is resized to.
    """
    length, size = (each.float()[:, None, None] for each in (lengths, sizes))
    scale = length / size
    place = torch.arange(longest, device=length.device)[None, None, :]
    result = torch.arange(shown, device=length.device)[None, :, None] + (size - shown).div(2, rounding_mode="floor")
    distance = (place + 0.5 - (result + 0.5) * scale).abs() / scale.clamp(min=1)
    weights = (1 - distance).clamp_(min=0).where(place < length, 0)
    return weights / weights.sum(2, keepdim=True)
