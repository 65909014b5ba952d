"""Compares what the ranks give ``ht.shard``: the loader's settings, the data set's length, and a few of its samples."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import multiprocessing
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.same_data import WHOLE, Sample, compare, sample_indices, summarise, within_time
from hpctrain.worker.adapters.torch.batches import tensors_in
from hpctrain.worker.adapters.torch.generators import generators_in, kept
from hpctrain.worker.comm import Communicator

_SEEDED = (
    "random_split(data, lengths, generator=torch.Generator().manual_seed(0)), or one seed on all ranks before the "
    "indices are drawn"
)
_ALIKE = "give DataLoader and ht.shard the same settings on every rank"
# How often a sample that differs between ranks is fetched again: a random choice may be the same a few times.
_AGAIN = 8
# To find the axes that count a collate_fn's samples: the sizes of trial batches, and how many samples are tried.
_COUNTS, _TRIED = (2, 5), 8
# Compared data sets by id, so that a loader that is made anew for each epoch costs one small message.
_compared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class SampleAxes(NamedTuple):
    """The dimensions of a loader's batches that count samples, as far as they are known.

    Attributes:
        tensors: how many tensors a batch has.
        axes: pairs of a tensor's number in the batch and its dimension.
    """

    tensors: int = 0
    axes: frozenset[tuple[int, int]] = frozenset()

    def check(self, batch: Any, count: int, rank: int) -> None:
        """Refuse a batch of fewer samples than the ``count`` that its gradient would be weighted by.

        Raises:
            HpctrainError: the collate_fn left some out.
        """
        if not self.axes:
            return
        shapes = [tensor.shape for tensor in tensors_in(batch)]
        if len(shapes) != self.tensors:
            return
        sizes = [shapes[number][axis] for number, axis in self.axes if axis < len(shapes[number])]
        if sizes and max(sizes) < count:
            raise HpctrainError(
                "HT-loader-samples-left-out",
                "a batch of rank {rank} has {samples} samples, but the data set gave {count}: the "
                "loader's collate_fn left some out, and gradients are weighted by the number of samples",
                "leave them out of the data set before ht.shard: "
                "Subset(data, [i for i in range(len(data)) if data[i] is not None])",
                rank=rank,
                samples=max(sizes),
                count=count,
            )

    def of_both(self, other: SampleAxes) -> SampleAxes:
        """The axes that were found with both of two samples."""
        return SampleAxes(self.tensors, self.axes & other.axes if self.tensors == other.tensors else frozenset())


def compare_loaders(
    comm: Communicator, loader: DataLoader[Any], *, evaluation: bool, seed: int, agreed: bool = False
) -> SampleAxes:
    """Refuse loaders that differ between ranks. Collective.

    Args:
        agreed: whether the ranks agree while they draw, which they have to do equally far ahead.

    Raises:
        HpctrainError: names what differs, with the values of two ranks; raised on all ranks.
    """
    if comm.size == 1:
        return SampleAxes()
    data: Any = loader.dataset
    samples = len(data) if hasattr(data, "__len__") else 0
    facts = {"the number of samples": (str(samples), WHOLE)}
    facts |= {f"the indices of {name}": (text, _SEEDED) for name, text in _indices(data)}
    facts |= settings_alike(loader, evaluation=evaluation, seed=seed, agreed=agreed)
    counts = not evaluation and loader.collate_fn is not default_collate
    probe = _Probe(loader, _Visit(loader.collate_fn if counts else None))
    wanted = sample_indices(samples)
    with _generators_kept(data):
        if _compared.get(id(data)) is data:
            compare(comm, facts)
            if counts:
                list(itertools.islice(probe.summaries(wanted), 2))
        else:
            compare(
                comm,
                facts,
                within_time(probe.summaries(wanted)),
                lambda i: [summary for _, summary in probe.summaries([i] * _AGAIN)],
            )
            with contextlib.suppress(TypeError):  # a list has no weak references
                _compared[id(data)] = data
    return probe.axes or SampleAxes()


def settings_alike(loader: DataLoader[Any], *, evaluation: bool, seed: int, agreed: bool) -> dict[str, tuple[str, str]]:
    """The settings that have to be equal on all ranks, for :func:`hpctrain.worker.adapters.same_data.compare`."""
    settings = {
        "batch_size": loader.batch_size,
        "the sampler": type(loader.sampler).__name__,
        "drop_last": loader.drop_last,
        "evaluation": evaluation,
        "seed": seed,
    }
    if agreed:
        settings |= {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
    return {name: (str(value), _ALIKE) for name, value in settings.items()}


def _indices(data: Any, name: str = "Subset") -> Iterator[tuple[str, str]]:
    """The indices of a Subset, and of the one within it, as texts by name."""
    if isinstance(data, Subset):
        indices = np.asarray(data.indices)
        shown = ", ".join(map(str, indices[:6].tolist())) + (", …" if len(indices) > 6 else "")
        yield name, f"[{shown}], hash {xxhash.xxh3_64_hexdigest(indices.tobytes())[:8]}"
        yield from _indices(data.dataset, f"{name}.dataset")


def _is_plain(data: Any) -> bool:
    """Whether samples are read from memory, which needs no worker process."""
    if isinstance(data, ConcatDataset):
        return all(map(_is_plain, data.datasets))
    return _is_plain(data.dataset) if isinstance(data, Subset) else type(data) in (TensorDataset, list, tuple)


@dataclass
class _Visit:
    """The collate_fn of a loader of single samples: a summary of each, and the axes along which ``collate`` counts."""

    collate: Callable[[list[Any]], Any] | None
    left: int = _TRIED

    def __call__(self, samples: list[Any]) -> tuple[Sample, SampleAxes | None]:
        (sample,) = samples
        summary, axes = summarise(sample), None
        if self.collate and self.left:
            self.left -= 1
            with contextlib.suppress(Exception):  # a sample that it leaves out
                axes = _axes(self.collate, sample)
        _seed()
        return summary, axes


def axes_of(collate: Callable[[list[Any]], Any], sample: Any) -> SampleAxes:
    """The dimensions that count samples in what ``collate`` makes, as far as one sample shows them."""
    with kept(), contextlib.suppress(Exception):  # a sample that it leaves out
        return _axes(collate, sample) or SampleAxes()
    return SampleAxes()


def _axes(collate: Callable[[list[Any]], Any], sample: Any) -> SampleAxes | None:
    """The axes that count the copies in batches of one sample's; None for a sample that ``collate`` leaves out."""
    found: list[SampleAxes] = []
    for count in _COUNTS:
        # Copied because a collate_fn may change its samples.
        batch = collate([copy.deepcopy(sample) for _ in range(count)])
        shapes = [tensor.shape for tensor in tensors_in(batch)]
        if not any(map(math.prod, shapes)):
            return None
        axes = frozenset((i, axis) for i, shape in enumerate(shapes) for axis, n in enumerate(shape) if n == count)
        found.append(SampleAxes(len(shapes), axes))
    return found[0].of_both(found[1])


class _Probe:
    """Fetches single samples as the loader does, and leaves no trace in this process's random numbers.

    It uses a worker process if the loader does, since a data set may open files in the first process that reads it.
    """

    def __init__(self, loader: DataLoader[Any], visit: _Visit) -> None:
        self._loader, self._visit = loader, visit
        self._workers = 0 if _is_plain(loader.dataset) or not loader.num_workers else 1
        self.axes: SampleAxes | None = None

    def summaries(self, indices: Iterable[int]) -> Iterator[tuple[int, Sample]]:
        """Summaries of samples; None for one that cannot be fetched, which is left to the training."""
        # Workers that are not forked would import PyTorch again, which takes seconds.
        if self._workers and _start_method(self._loader) != "fork":
            return
        chosen = list(indices)
        with kept():
            batches = iter(self._single(chosen))
        for index in chosen:
            summary, axes = None, None
            with kept(), contextlib.suppress(Exception):
                _seed()
                summary, axes = next(batches)
            if axes is not None:
                self.axes = axes if self.axes is None else self.axes.of_both(axes)
            yield index, summary

    def _single(self, indices: list[int]) -> DataLoader[Any]:
        loader = self._loader
        settings: dict[str, Any] = {}
        if self._workers:
            settings = {"worker_init_fn": _seeding(loader.worker_init_fn), "timeout": loader.timeout}
        return DataLoader(
            loader.dataset,
            batch_sampler=[[index] for index in indices],
            num_workers=self._workers,
            collate_fn=self._visit,
            generator=torch.Generator(),
            **settings,
        )


def _start_method(loader: DataLoader[Any]) -> str:
    context: Any = loader.multiprocessing_context or multiprocessing
    return str(context.get_start_method())


def _seeding(first: Callable[[int], None] | None) -> Callable[[int], None]:
    def begin(worker: int) -> None:
        if first is not None:
            first(worker)
        _seed()

    return begin


def _seed() -> None:
    """Seed the generators, so that random transforms make the same choices on all ranks."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


def _generators_kept(data: Any) -> contextlib.AbstractContextManager[None]:
    """Restore the generators of a data set or its transforms, since timing decides how many samples were fetched."""
    return kept([] if _is_plain(data) else generators_in(data, {}))
