"""Gives every rank its part of a DataLoader's batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.recording import note_data_position, warn_of_data_restart
from hpctrain.worker.adapters.torch.orders import epoch_said_to, set_epoch
from hpctrain.worker.adapters.torch.random_streams import ready
from hpctrain.worker.adapters.torch.sources import Drawn, MapSource, Place, Source
from hpctrain.worker.adapters.torch.streams import StreamSource
from hpctrain.worker.adapters.torch.weights import batch_weights
from hpctrain.worker.comm import Communicator, current


class ShardedLoader:
    """This rank's part of each batch of a loader. All ranks use one order, a new one for each epoch.

    Each ``iter()`` is an epoch, and :meth:`set_epoch` says which. :meth:`state_dict` is the place of the next batch, in
    global batches, so :meth:`load_state_dict` continues there on any number of ranks, in the middle of an epoch too.
    """

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, evaluation: bool, seed: int) -> None:
        self._comm = comm
        self._weights = batch_weights(comm)
        self._evaluation = evaluation
        self._started = 0
        _refuse_loaded_state(loader)
        self._given = loader
        make = StreamSource if isinstance(loader.dataset, IterableDataset) else MapSource
        self._source: Source = make(loader, comm, evaluation=evaluation, seed=seed)
        self._loader = self._source.loader
        # Where the next iteration begins, and the place behind the last batch that the script was given.
        self._next = self._handed_out = Place()
        self._hear_epoch()
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        _refuse_loaded_state(self._given)
        if not self._evaluation:
            warn_of_data_restart(self._comm)
        self._hear_epoch()
        place = self._next
        set_epoch(place.epoch, *self._source.told)
        with self._unchanged_generator() if place.batches else contextlib.nullcontext():
            drawn = self._source.begin(place)  # takes the epoch's order
        self._next = Place(place.epoch + 1)
        self._handed_out = place
        self._started += 1
        self._weights.expect(self._source.totals, evaluation=self._evaluation, uneven=self._source.uneven)
        return self._draw(drawn, place.epoch, self._started)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` that epoch, whose order depends on its number and the seed alone.

        It begins at its first batch; or where :meth:`load_state_dict` has put it, if that was in this epoch. A call of
        ``set_epoch`` of the script's sampler or stream does the same.
        """
        note_data_position()
        if epoch != self._next.epoch:
            self._next = self._handed_out = Place(epoch)

    def _hear_epoch(self) -> None:
        """Take the epoch that the script has told its sampler or stream."""
        if (epoch := epoch_said_to(*self._source.told)) is not None:
            set_epoch(epoch, *self._source.told)
            if epoch != self._next.epoch:
                self.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place of the batch after the last that the script was given, whatever was read ahead.

        After a ``break`` that is the next batch of the same epoch; at the end of an epoch, the begin of the next.
        """
        epoch, batches, trace = self._handed_out
        order = {"order": list(trace)} if self._source.traced else {}
        return {"epoch": epoch, "batches": batches, **self._source.identity, **order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` begin at the place of :meth:`state_dict`, on this number of ranks.

        Where the order is that of a sampler of the script, or of a stream, the first batch that is then drawn is
        refused if the epoch had other samples until there.

        Raises:
            HpctrainError: not the state of a loader, or one in the middle of an epoch whose batches differ here.
        """
        own = self._source.identity
        if missing := {"epoch", "batches", *own, *(["order"] if self._source.traced else [])} - state.keys():
            raise HpctrainError(
                "HT-loader-bad-state",
                "this is not the state of a loader of ht.shard: it lacks {missing}",
                "load what its state_dict() returned",
                missing=", ".join(sorted(missing)),
            )
        if state["batches"] and (other := [name for name in own if own[name] != state[name]]):
            differ = ", ".join(f"{name} was {state[name]} and is {own[name]}" for name in other)
            raise HpctrainError(
                "HT-loader-different-batches",
                "the loader's state is in the middle of epoch {epoch}, whose batches were others: {differ}",
                f"load it with the same data, batch size and seed; or begin an epoch: set_epoch({state['epoch'] + 1})",
                epoch=state["epoch"],
                differ=differ,
            )
        note_data_position()
        self._next = self._handed_out = Place(state["epoch"], state["batches"], tuple(state.get("order", ())))

    @contextlib.contextmanager
    def _unchanged_generator(self) -> Iterator[None]:
        """Restore the generator after an epoch that is continued: its first beginning has drawn from it already."""
        generator = self._loader.generator or torch.default_generator
        state = generator.get_state()
        yield
        generator.set_state(state)

    def _draw(self, drawn: Iterator[Drawn], epoch: int, started: int) -> Iterator[Any]:
        for batch, total, own, after in drawn:
            if self._loader.persistent_workers and started != self._started:
                raise HpctrainError(
                    "HT-loader-two-iterators",
                    "two iterators of one loader at the same time share its persistent workers, and mix "
                    "up their batches",
                    "use one after the other, or persistent_workers=False",
                )
            if own or not self._evaluation:
                self._weights.drawn(batch, total, evaluation=self._evaluation)
            if started == self._started:
                self._handed_out = after
            if own or not self._evaluation:
                yield batch
        if started == self._started:
            self._handed_out = Place(epoch + 1)


def _refuse_loaded_state(loader: DataLoader[Any]) -> None:
    """Refuse a state that was loaded into torchdata's StatefulDataLoader itself.

    Raises:
        HpctrainError: says where a state is loaded.
    """
    if getattr(loader, "next_iter_state", None) is not None:
        raise HpctrainError(
            "HT-shard-loaded-state",
            "a state was loaded into this {kind}, which ht.shard does not use",
            "load_state_dict of what ht.shard returns takes what its state_dict() returned",
            kind=type(loader).__name__,
        )


def shard(
    data: DataLoader[Any], *, comm: Communicator | None = None, evaluation: bool = False, seed: int = 0
) -> ShardedLoader:
    """Divide each batch of a loader over the ranks. Collective.

    The loader's ``batch_size`` is that of the global batch, so the script gives the same numbers on any number of
    ranks. If it does not divide evenly, gradients are weighted by the number of samples they were computed from, so the
    mean over the ranks is still the mean over the batch; a rank without a sample of its own gets another rank's, with
    weight 0. Batches may be prefetched, drawn again or left unused: the weight follows the tensors into the model
    (:mod:`hpctrain.worker.adapters.torch.weights`). If hpctrain cannot tell which batch a model computed, the backward
    pass raises HpctrainError before a gradient is reduced: pass the model the tensors that the loader yields, or views
    or copies of whole ones. ``torch.autograd.grad`` sees weighted gradients too.

    The ranks compare the loader's settings, the length of its data set, the indices of a ``Subset``, and what up to 64
    samples look like, for at most about 0.05 s or two samples; what differs from fetch to fetch on one rank is not
    compared. A training batch from which ``collate_fn`` left samples out is refused.

    A sampler or batch sampler of the script is drawn on rank 0 for all ranks, so that what it draws at random is equal
    on them, and each of its batches is divided. A sampler that is divided over the ranks itself, as DistributedSampler,
    is left as it is, with its own batch size.

    An iterable data set is read whole on every rank, which takes its part of each batch: that of one process with as
    many workers. The ranks compare a few numbers of each batch before the script gets it, and refuse streams that
    differ. Drawing a batch is collective there, as it is at the begin of an epoch with a sampler of the script.

    Args:
        data: a loader that makes batches. Within ``__iter__`` of a sampler or an iterable data set, random numbers of
            Python's, NumPy's and PyTorch's own generators depend on ``seed`` and the epoch alone.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        evaluation: every sample is seen exactly once over all ranks, unweighted; ranks may get different numbers of
            batches.
        seed: determines the order, together with the epoch number.

    Raises:
        HpctrainError: a loader that makes no batches, or whose sampler or data set is divided over other ranks; or
            ranks that were given different data or settings.
    """
    comm = comm or current()
    if not isinstance(data, DataLoader):
        raise HpctrainError(
            "HT-call-wrong-object",
            "{module}.{kind} is not {wanted}",
            "DataLoader(dataset, batch_size=…)",
            module=type(data).__module__,
            kind=type(data).__name__,
            wanted="a torch DataLoader, which ht.shard divides",
        )
    sharded = ShardedLoader(data, comm, evaluation=evaluation, seed=seed)
    if not evaluation:
        ready(comm, "data")
    return sharded
