"""Decodes photographs on a rank's GPU with nvJPEG, through torchvision, and cuts and resizes them there in batches.

Which part of a photograph is cut is drawn as in the workers of :mod:`hpctrain.worker.data.image_loader`, from the same
random numbers; the pixels differ a little, by decoder and filter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import simplejpeg
import torch

from hpctrain.common.cluster.gpus import gpu_of
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.common.shards.decoding import END, BrokenImageError, decode
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.decoder import Cut, Decoder, DecodingJob, LoadedPiece
from hpctrain.worker.data.image_loader import Pool
from hpctrain.worker.data.sampling import Indices

# Decodes JPEG files to a device, each to uint8 of shape (3, height, width); RuntimeError if it cannot decode one.
DecodeAll = Callable[[Sequence[bytes], torch.device], Sequence[torch.Tensor]]

# The most pixels, of photographs filled up to the largest of them, that are decoded and resized together.
_MOST_TOGETHER = 1 << 26


def by_nvjpeg(contents: Sequence[bytes], device: torch.device) -> Sequence[torch.Tensor]:
    """Decode JPEG files on a GPU, in colour."""
    from torchvision.io import ImageReadMode, decode_jpeg

    files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    decoded: list[torch.Tensor] = decode_jpeg(files, ImageReadMode.RGB, device)
    return decoded


def card_of(comm: Communicator | None) -> torch.device | None:
    """The GPU of this rank, as its trainer chooses it; None if it has none."""
    if comm is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    gpus = 0 if comm.in_host_memory else torch.cuda.device_count()
    own = gpu_of(comm.local_rank, comm.local_size, gpus, shared=bool(SHARE_GPUS.read()))
    return None if own is None else torch.device("cuda", own)


def cannot_decode(problem: str, hint: str = "") -> HpctrainError:
    """The error where GPUs are to decode and cannot; the hint says what comes before another setting."""
    hint = f"{hint}--set data.decode=scaled"
    return HpctrainError("HT-decode-gpu-fails", "data.decode: gpu, but {problem}", hint, problem=problem)


def require_card(comm: Communicator | None) -> torch.device:
    """The GPU that decodes for this rank.

    Raises:
        HpctrainError: there is none, or torchvision is missing or decodes nothing there.
    """
    card = card_of(comm)
    if card is None:
        problem = f"this rank trains on no GPU (backend {comm.backend if comm else 'single'})"
        raise cannot_decode(problem, "--backend nccl, where PyTorch sees a GPU for each rank; or ")
    install = "install the torchvision that belongs to this PyTorch, built for CUDA; or "
    try:
        by_nvjpeg([simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8))], card)
    except Exception as error:
        raise cannot_decode(f"torchvision decodes no photograph on {card}: {error}", install) from error
    return card


class CardPool(Pool):
    """Makes images on a GPU, as tensors there.

    A thread makes one piece ahead, on a stream of the GPU's own. Photographs that are no ordinary JPEG files, that are
    cut short or that nvJPEG cannot decode are decoded by the processor: the same ones are broken.

    Args:
        folder: what ``hpctrain data shard`` wrote.
        device: a GPU, or the processor in tests.
    """

    def __init__(self, folder: Path, recipe: Recipe, device: torch.device, decode_all: DecodeAll = by_nvjpeg) -> None:
        super().__init__(DecodingJob(folder=folder.absolute(), seed=recipe.seed, images=recipe.images))
        self._device, self._decode_all = device, decode_all
        self._on_card = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stream(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        with ThreadPoolExecutor(1, "decoding", initializer=self._choose_card) as thread:
            before = None
            for indices in pieces:
                coming = thread.submit(self._piece, decoder, split, indices, epoch)
                if before:
                    yield self._taken(before)
                before = coming
            if before:
                yield self._taken(before)

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

    def _piece(self, decoder: Decoder, split: str, indices: Indices, epoch: int) -> LoadedPiece:
        with torch.cuda.stream(self._on_card), torch.no_grad():
            piece = self._made(decoder, split, indices, epoch)
            if self._on_card:
                self._on_card.synchronize()
        return piece

    def _made(self, decoder: Decoder, split: str, indices: Indices, epoch: int) -> LoadedPiece:
        shape = (len(indices), *self.job.shape(split, epoch))
        images = torch.empty(shape, dtype=torch.uint8, device=self._device)
        for together in _together(list(decoder.cuts(indices, epoch))):
            if self._on_card:
                # torchvision decodes on a stream of its own, into memory that this one may still read.
                self._on_card.synchronize()
            photographs = self._photographs(decoder, together)
            images[[cut.position for cut in together]] = resized(photographs, together, shape[1])
        return LoadedPiece(indices=indices, images=images)

    def _photographs(self, decoder: Decoder, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        """Each photograph as uint8 of shape (3, height, width)."""
        # nvJPEG may fill up what is cut short.
        decoded = self._decoded([cut for cut in cuts if cut.header.pixels is None and cut.content.endswith(END)])
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
            alone = [self._decoded([cut]) for cut in cuts] if len(cuts) > 1 else []
            return {position: photograph for one in alone for position, photograph in one.items()}
        return {cut.position: photograph for cut, photograph in zip(cuts, found, strict=True)}

    def _by_processor(self, decoder: Decoder, cut: Cut) -> torch.Tensor:
        header = cut.header
        try:
            pixels = decode(cut.content, header.width, header.height) if header.pixels is None else header.pixels
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
    for place, photograph, crop in zip(padded, photographs, crops, strict=True):
        part = photograph[:, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        place[:, : crop.height, : crop.width] = part
    rows = weights([crop.height for crop in crops], [cut.height for cut in cuts], size, device)
    columns = weights([crop.width for crop in crops], [cut.width for cut in cuts], size, device)
    flips = torch.tensor([cut.flip for cut in cuts], device=device)
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    found = rows.to(dtype)[:, None] @ padded @ columns.to(dtype).transpose(1, 2)[:, None]
    return found.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def weights(lengths: list[int], sizes: list[int], shown: int, device: torch.device) -> torch.Tensor:
    """The share of each pixel of a side in each of the ``shown`` middle pixels, of shape (N, shown, longest).

    Args:
        lengths: the pixels of each side.
        sizes: those that it is resized to.
    """
    length, size = (torch.tensor(each, dtype=torch.float32, device=device)[:, None, None] for each in (lengths, sizes))
    scale = length / size
    place = torch.arange(max(lengths), device=device)[None, None, :]
    result = torch.arange(shown, device=device)[None, :, None] + (size - shown).div(2, rounding_mode="floor")
    distance = (place + 0.5 - (result + 0.5) * scale).abs() / scale.clamp(min=1)
    weights = (1 - distance).clamp_(min=0).where(place < length, 0)
    return weights / weights.sum(2, keepdim=True)
