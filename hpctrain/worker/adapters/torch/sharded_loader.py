"""Divides a DataLoader's batches over the ranks, epoch by epoch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.adapters.recording import note_data_position, warn_of_data_restart
from hpctrain.worker.adapters.torch import batch
from hpctrain.worker.adapters.torch.orders import refuse_divided, set_epoch
from hpctrain.worker.adapters.torch.sources import MapSource, Place
from hpctrain.worker.adapters.torch.streams import StreamSource
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.script_location import mismatch_error, script_line

Source = MapSource | StreamSource


class _Loaders:
    """The loaders of a communicator's ranks."""

    def __init__(self) -> None:
        self.count = 0
        # By the settings of a loader and the kind of its data set.
        self.following: dict[str, int] = {}
        # By these and the state of the generator when it was made.
        self.first: dict[tuple[str, int], int] = {}


class Epochs:
    """The epochs of a loader. One that is made again, with the same settings, goes on where those before it were left.

    One process has other orders then, since PyTorch's generator goes on. After ``torch.manual_seed`` it has the same
    ones again: so a loader begins where one began for which the generator was in the same state.

    Attributes:
        number: the loader's number among those of the ranks.
        first: the epoch that it begins with.
    """

    def __init__(self, comm: Communicator, loader: DataLoader[Any], identity: Mapping[str, Any]) -> None:
        self._loaders = loaders = comm.part("loaders", _Loaders)
        self._key = f"{type(loader.dataset).__name__} {dict(identity)}"
        state = (loader.generator or torch.default_generator).get_state()
        made = self._key, xxhash.xxh3_64_intdigest(state.numpy().tobytes())
        own = loaders.first.setdefault(made, loaders.following.get(self._key, 0))
        self.first = comm.broadcast_object(own)
        loaders.count += 1
        self.number = loaders.count

    def begun(self, epoch: int) -> None:
        """Note that the loader has begun an epoch."""
        following = self._loaders.following
        following[self._key] = max(following.get(self._key, 0), epoch + 1)


def require_all_ranks(comm: Communicator, number: int, place: Place) -> None:
    """Refuse that ranks begin to read other loaders, or one at other places of its epochs or of the script."""
    if comm.size == 1:
        return
    # The name alone, because hosts may keep the script in different folders. A thread may read at any time.
    at = f" at {Path(script_line()).name}" if threading.current_thread() is threading.main_thread() else ""
    own = f"beginning epoch {place.epoch} of loader {number} of ht.shard{at}"
    if place.batches:
        own += f", after batch {place.batches}"
    places = comm.agreement().gather((comm.host, own))
    if len({where for _, where in places}) > 1:
        raise mismatch_error(places)


class ShardedLoader:
    """A loader whose batches the ranks divide. All ranks use one order, a new one for each epoch.

    Each ``iter()`` is an epoch, and :meth:`set_epoch` says which. :meth:`state_dict` is the place of the next batch, in
    global batches, so :meth:`load_state_dict` continues there on any number of ranks, in the middle of an epoch too.
    Its other attributes are those of the loader that it was made of.
    """

    def __init__(
        self, loader: DataLoader[Any], comm: Communicator, *, evaluation: bool, seed: int, by_sample: bool
    ) -> None:
        self._comm = comm
        comm.divides_batches = True
        self._evaluation = evaluation
        self._started = 0
        refuse_divided(loader)
        self._given = loader
        make: type[Source] = StreamSource if isinstance(loader.dataset, IterableDataset) else MapSource
        self._source = make(loader, comm, seed=seed, by_sample=by_sample)
        self._loader = self._source.loader
        self._epochs = Epochs(comm, loader, self._source.identity)
        if comm.size > 1:
            comm.agreement()  # formed here, where all ranks are
        # Where the next iteration begins, and the place behind the last batch that the script was given.
        self._next = self._handed_out = Place(self._epochs.first)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        if not self._evaluation:
            warn_of_data_restart(self._comm)
        place = self._next
        require_all_ranks(self._comm, self._epochs.number, place)
        set_epoch(place.epoch, *self._source.told)
        generator = self._loader.generator or torch.default_generator
        state = generator.get_state()
        # Takes the epoch's order. A loader that is made again was compared before.
        drawn = self._source.begin(place, look=not self._epochs.first and not self._started)
        if place.batches:  # the epoch's first beginning has drawn from it already
            generator.set_state(state)
        self._next = Place(place.epoch + 1)
        self._epochs.begun(place.epoch)
        self._handed_out = place
        self._started += 1
        return self._draw(drawn, place.epoch, self._started)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` that epoch, whose order depends on its number and the seed alone.

        It begins at its first batch; or where :meth:`load_state_dict` has put it, if that was in this epoch. A sampler
        or stream of the script that has a ``set_epoch`` is told it when the epoch begins.
        """
        note_data_position()
        if epoch != self._next.epoch:
            self._next = self._handed_out = Place(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place of the batch after the last that the script was given, whatever was read ahead.

        After a ``break`` that is the next batch of the same epoch; at the end of an epoch, the begin of the next.
        """
        epoch, batches, trace = self._handed_out
        order = {"order": trace} if self._source.traced else {}
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
                "HT-loader-order-not-kept",
                "the loader's state is in the middle of epoch {epoch}, whose batches were others: {differ}",
                f"load it with the same data, batch size and seed; or begin an epoch: set_epoch({state['epoch'] + 1})",
                epoch=state["epoch"],
                differ=differ,
            )
        note_data_position()
        self._next = self._handed_out = Place(state["epoch"], state["batches"], state.get("order", 0.0))

    def _draw(self, drawn: Iterator[tuple[Any, Place]], epoch: int, started: int) -> Iterator[Any]:
        while True:
            with run.times.reads():
                following = next(drawn, None)
            if following is None:
                break
            drawn_batch, after = following
            if self._loader.persistent_workers and started != self._started:
                raise HpctrainError(
                    "HT-loader-two-iterators",
                    "two iterators of one loader at the same time share its persistent workers, and mix "
                    "up their batches",
                    "use one after the other, or persistent_workers=False",
                )
            if started == self._started:
                self._handed_out = after
            yield drawn_batch
        if started == self._started:
            self._handed_out = Place(epoch + 1)


def shard(
    data: DataLoader[Any],
    *,
    comm: Communicator | None = None,
    evaluation: bool = False,
    seed: int = 0,
    collate_by_sample: bool = False,
) -> ShardedLoader:
    """Divide each batch of a loader over the ranks. Collective.

    The loader's ``batch_size`` is that of the global batch, and so is what it yields: tensors of the class
    :class:`BatchTensor`, with the shape and values of one process's batch, of which each rank holds some rows. What a
    script computes from them is what one process computes. ``.local`` are the rows of this rank, ``.whole()`` the
    gathered tensor. With one rank the tensors are plain ones.

    With PyTorch's own ``collate_fn`` each rank reads its samples of a batch only. Any other may pad samples to the
    longest, mix them, or leave some out: there each rank reads and collates all samples, and keeps its rows of the
    tensors in which a dimension counts samples; other tensors and arrays are whole on each rank.

    Random numbers that a data set or a ``collate_fn`` draws with the generators of Python, NumPy and PyTorch, or with
    some that they hold, depend on ``seed``, the epoch, and the sample or batch: not on the number of ranks or workers.

    A sampler or batch sampler of the script is drawn on rank 0 for all ranks, so that what it draws at random is equal
    on them, and each of its batches is divided. One that divides the samples itself, as DistributedSampler, is refused.

    An iterable data set is read whole on every rank: its batches are those of one process with as many workers. The
    ranks compare a few numbers of each batch before the script gets it, and refuse streams that differ.

    The ranks compare the loader's settings, the length of its data set, the indices of a ``Subset``, and with the first
    batch a few samples. All of them have to read the loader, at the same places of the script.

    Args:
        data: a loader that makes batches.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        evaluation: whether the batches are not trained with, so that a run that starts again need not go on in them.
        seed: determines the order, together with the epoch number. A loader that is made again, with the same settings,
            goes on with the next epoch.
        collate_by_sample: states that a ``collate_fn`` of the script's own treats each sample by itself, and makes of
            some samples the same rows as of all of them. Each rank then reads its own samples only.

    Raises:
        HpctrainError: a loader that makes no batches, or whose sampler or data set divides the samples already; or
            ranks that were given different data or settings.
    """
    comm = comm or current()
    # A DataLoader divides a pipe over its workers where it sees one, and here it would not.
    if not isinstance(data, DataLoader) or data.batch_sampler is None or isinstance(data.dataset, IterDataPipe):
        raise HpctrainError(
            "HT-shard-wrong-data",
            "ht.shard needs a DataLoader that makes batches, by batch_size or batch_sampler, and not of a pipe",
            "DataLoader(dataset, batch_size=…); for a stream, class Samples(IterableDataset) with __iter__",
        )
    if data_place(comm).ranks > 1:
        batch.install()
    return ShardedLoader(data, comm, evaluation=evaluation, seed=seed, by_sample=collate_by_sample)
