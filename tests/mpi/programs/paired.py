"""Each two different calls of the control plane, one on rank 0 and the other on the other ranks: refused on all.

``python paired.py BACKEND``. After each pair the ranks agree by the communicator itself that all of them were refused,
so that one start is enough for all pairs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # noqa: F401 - for Gloo, and to begin with it imported

import hpctrain as ht
from hpctrain.common.errors import HpctrainError

comm = ht.init(sys.argv[1])
rank, size = comm.rank, comm.size
three = np.arange(3.0)
# By the words that the message has for each.
CALLS: dict[str, Callable[[], object]] = {
    "barrier": comm.barrier,
    "broadcast_object": lambda: comm.broadcast_object("mine"),
    "allgather_object": lambda: comm.allgather_object("mine"),
    "allreduce (sum) of float64[3]": lambda: comm.allreduce(three, "sum"),
    "allreduce (max) of float64[3]": lambda: comm.allreduce(three, "max"),
    "allreduce (mean) of float32[3]": lambda: comm.allreduce(three.astype(np.float32)),
    "allreduce (sum) of float64[2000]": lambda: comm.allreduce(np.ones(2000), "sum"),
    "ht.should_stop": ht.should_stop,
    "ht.mean": lambda: ht.mean(1.0),
    "ht.gather": lambda: ht.gather([1.0]),
    "broadcast_bytes of 4 from rank 0": lambda: comm.broadcast_bytes(np.zeros(4, np.uint8)),
    "broadcast_bytes of 4 from rank 1": lambda: comm.broadcast_bytes(np.zeros(4, np.uint8), 1),
    "groups of": lambda: comm.group(1),
    "large objects": lambda: comm.allgather_object(bytes(3000)),
}
SAME = {"large objects": "allgather_object"}
# What hpctrain's own functions call.
SHOWN = {**SAME, "ht.should_stop": "allreduce (max)", "ht.mean": "all", "ht.gather": "all"}


def refusal(call: Callable[[], object]) -> dict[str, Any] | None:
    """The record of the error of a call, which is made here: the error names the line."""
    try:
        call()
    except HpctrainError as error:
        return error.record()
    return None


for mine, theirs in itertools.permutations(CALLS, 2):
    found = refusal(CALLS[mine if rank == 0 else theirs])
    if SAME.get(mine, mine) == SAME.get(theirs, theirs):
        assert not found, found
        continue
    assert found is not None and found["code"] == "HT-ranks-in-different-calls", (mine, theirs, found)
    places = [str(place) for place in found["values"]["places"].values()]
    for place, call in zip(places, (mine, *[theirs] * (size - 1)), strict=True):
        assert SHOWN.get(call, call) in place and "paired.py:" in place, (mine, theirs, found)
    assert all(each == found for each in comm.allgather_object(found))

# The same call from other lines is one call: branches of rank 0 and of the others.
if rank == 0:
    assert comm.broadcast_object("rank 0's") == "rank 0's"
    comm.barrier()
else:
    assert comm.broadcast_object(None) == "rank 0's"
    comm.barrier()
print("every pair refused", flush=True)
# The last: it meets hpctrain's own last checks on the other ranks.
comm.add_last_check(comm.barrier)
if rank == 0:
    print(comm.allgather_object("mine"))
