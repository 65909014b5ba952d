"""The control plane's collectives, each compared with a closed form; then a rank that does not come, or that ends.

``python comm_control.py [stall|die]``
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

import hpctrain as ht

comm = ht.init()
rank, size = comm.rank, comm.size
assert (comm.local_rank, comm.local_size) == (rank, size)
if comm.backend == "gloo":
    # It is not on the device that a script has chosen for its own tensors.
    sys.modules["torch"].set_default_device("meta")

# objects of any size, a large one beyond one eager message included
assert comm.broadcast_object({"rank": rank, "text": "x" * rank}) == {"rank": 0, "text": ""}
assert len(comm.broadcast_object(bytes(3_000_000) if rank == 0 else None)) == 3_000_000
everyone = comm.allgather_object([rank] * (rank * 1000))
assert everyone == [[r] * (r * 1000) for r in range(size)]

values = np.arange(6, dtype=np.float64).reshape(2, 3) + rank
total = size * (size - 1) / 2
np.testing.assert_array_equal(comm.allreduce(values, "sum"), np.arange(6).reshape(2, 3) * size + total)
np.testing.assert_allclose(comm.allreduce(values), np.arange(6).reshape(2, 3) + total / size)
np.testing.assert_array_equal(comm.allreduce(values, "min"), np.arange(6).reshape(2, 3))
np.testing.assert_array_equal(comm.allreduce(values, "max"), np.arange(6).reshape(2, 3) + size - 1)
assert comm.allreduce(np.array(float(rank)), "max").shape == ()
# a slice with gaps must arrive whole
np.testing.assert_array_equal(comm.allreduce(values[:, ::2], "max"), values[:, ::2] - rank + size - 1)
assert values[0, 0] == rank, "the argument was written to"
comm.barrier()
print("collectives agree", flush=True)

if sys.argv[1:] and rank == 1:
    if sys.argv[1] == "die":
        os._exit(0)
    time.sleep(600)
comm.barrier()
