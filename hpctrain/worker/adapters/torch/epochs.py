"""Which epoch a sharded loader begins with, and that all ranks begin it together."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

from hpctrain.worker.adapters.torch.sources import Place
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.agreement import agreement
from hpctrain.worker.comm.deadlocks import mismatch_error
from hpctrain.worker.comm.script_location import script_line

# Of a tensor that is compared with another one, so many elements at its begin and at its end.
_FEW = 64


class _Loaders:
    """The loaders of a communicator's ranks."""

    def __init__(self) -> None:
        self.count = 0
        # By the data set and the settings of a loader.
        self.following: dict[str, int] = {}
        # By these and the state of the generator when it was made.
        self.first: dict[tuple[str, int], int] = {}


_all: weakref.WeakKeyDictionary[Communicator, _Loaders] = weakref.WeakKeyDictionary()
_data_sets = WeakIdKeyDictionary()
_serial = itertools.count()


class Epochs:
    """The epochs of a loader. One that is made again, of the same data set, goes on where those before it were left.

    One process has other orders then, since PyTorch's generator goes on. After ``torch.manual_seed`` it has the same
    ones again: so a loader begins where one began for which the generator was in the same state.

    Attributes:
        number: the loader's number among those of the ranks.
        first: the epoch that it begins with.
    """

    def __init__(self, comm: Communicator, loader: DataLoader[Any], identity: Mapping[str, Any]) -> None:
        self._loaders = loaders = _all.setdefault(comm, _Loaders())
        self._key = f"{_data_set(loader.dataset)} {dict(identity)}"
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


def _data_set(data: Any) -> str:
    """What tells a data set from others."""
    if isinstance(data, Subset):
        return f"{xxhash.xxh3_64_hexdigest(np.asarray(data.indices).tobytes())} of {_data_set(data.dataset)}"
    if isinstance(data, TensorDataset):
        return " ".join(map(_tensor, data.tensors))
    try:
        return str(_data_sets.setdefault(data, next(_serial)))
    except TypeError:  # a list has no weak references
        return type(data).__name__


def _tensor(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    return f"{tuple(tensor.shape)} {flat[:_FEW].tolist()} {flat[-_FEW:].tolist()}"


def require_all_ranks(comm: Communicator, number: int, place: Place) -> None:
    """Refuse that ranks begin to read other loaders, or one at other places of its epochs or of the script. Collective.

    Raises:
        HpctrainError: says where each rank is; raised on all ranks.
    """
    if comm.size == 1:
        return
    # The name alone, because hosts may keep the script in different folders. A thread may read at any time.
    at = f" at {Path(script_line()).name}" if threading.current_thread() is threading.main_thread() else ""
    own = f"beginning epoch {place.epoch} of loader {number} of ht.shard{at}"
    if place.batches:
        own += f", after batch {place.batches}"
    places = agreement(comm).gather((comm.host, own))
    if len({where for _, where in places}) > 1:
        raise mismatch_error(places)
