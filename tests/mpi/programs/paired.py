"""Each two different calls of the control plane, one on rank 0 and the other on the other ranks: refused on all.

``python paired.py BACKEND``. After each pair the ranks agree by the communicator itself that all of them were refused,
so that one start is enough for all pairs.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable

import numpy as np

import hpctrain as ht
from hpctrain.common.errors import HpctrainError

comm = ht.init(sys.argv[1])
rank, size = comm.rank, comm.size
three = np.arange(3.0)
# By the words that the message has for each.
CALLS: dict[str, Callable[[], object]] = {
    "comm.barrier": comm.barrier,
    "comm.broadcast_object": lambda: comm.broadcast_object("mine"),
    "comm.allgather_object": lambda: comm.allgather_object("mine"),
    "comm.allreduce (sum) of float64[3]": lambda: comm.allreduce(three, "sum"),
    "comm.allreduce (max) of float64[3]": lambda: comm.allreduce(three, "max"),
    "comm.allreduce (mean) of float32[3]": lambda: comm.allreduce(three.astype(np.float32)),
    "comm.allreduce (sum) of float64[2000]": lambda: comm.allreduce(np.ones(2000), "sum"),
    "ht.should_stop": ht.should_stop,
    "ht.mean": lambda: ht.mean(1.0),
    "ht.gather": lambda: ht.gather([1.0]),
    "comm.broadcast_bytes of 4 from rank 0": lambda: comm.broadcast_bytes(np.zeros(4, np.uint8)),
    "comm.broadcast_bytes of 4 from rank 1": lambda: comm.broadcast_bytes(np.zeros(4, np.uint8), 1),
    "groups of": lambda: comm.group(1),
    "large objects": lambda: comm.allgather_object(bytes(3000)),
}
SAME = {"large objects": "comm.allgather_object"}


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except HpctrainError as error:
        return str(error)
    return ""


for mine, theirs in itertools.permutations(CALLS, 2):
    message = refused(CALLS[mine if rank == 0 else theirs])
    if SAME.get(mine, mine) == SAME.get(theirs, theirs):
        assert not message, message
        continue
    assert "the ranks are waiting for each other in different places" in message, (mine, theirs, message)
    first, second = (re.escape(SAME.get(each, each)) for each in (mine, theirs))
    assert re.search(rf"rank 0 on \S+ in {first}.*; rank 1 on .* in {second}", message), (mine, theirs, message)
    assert message.count("paired.py:") == 2, message
    assert len(set(comm.allgather_object(message))) == 1

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
