"""What the backend gloo promises: the control plane, the engine on every type, and nothing left open afterwards.

``python torch_distributed.py [stall|die]``: then a rank that does not come, or that ends without a word.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import psutil
import torch
from situations import refused

import hpctrain as ht


def listening() -> set[tuple[str, int]]:
    return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


if "TORCHELASTIC_RUN_ID" not in os.environ:
    from mpi4py import MPI  # noqa: F401 - whose own ports are open from here on

before = listening()
for _ in range(2):
    comm = ht.init("gloo")
    assert all(address == "127.0.0.1" for address, _ in listening() - before), listening() - before
    # A script may keep its last work for as long as it runs.
    kept = [comm.torch().allreduce(torch.zeros(3, dtype=dtype), "kept") for dtype in (torch.float32, torch.float16)]
    for work in kept:
        work.wait()
    ht.shutdown()
    assert listening() == before, listening() - before
    refused(comm.barrier, "HT-communicator-after-shutdown")

comm = ht.init("gloo")
rank, size = comm.rank, comm.size
assert (comm.local_rank, comm.local_size) == (rank, size)

# control plane, which is not on the device that a script has chosen for its own tensors
torch.set_default_device("meta")
assert comm.broadcast_object({"rank": rank, "text": "x" * rank}) == {"rank": 0, "text": ""}
assert len(comm.broadcast_object(bytes(3_000_000) if rank == 0 else None)) == 3_000_000
assert comm.allgather_object([rank] * (rank * 1000)) == [[r] * (r * 1000) for r in range(size)]
values = np.arange(6, dtype=np.float64).reshape(2, 3) + rank
total = size * (size - 1) / 2
np.testing.assert_array_equal(comm.allreduce(values, "sum"), np.arange(6).reshape(2, 3) * size + total)
np.testing.assert_allclose(comm.allreduce(values), np.arange(6).reshape(2, 3) + total / size)
np.testing.assert_array_equal(comm.allreduce(values[:, ::2], "max"), values[:, ::2] - rank + size - 1)
np.testing.assert_array_equal(comm.allreduce(np.array(rank), "min"), 0)
assert values[0, 0] == rank, "the argument was written to"
comm.barrier()
torch.set_default_device(None)

# data plane: in 16 bits the sum of these would lose the small ones if it were rounded before its end
engine = comm.torch()
works = []
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for length in (1, size, 1001):
        buffer = engine.allocate(length, dtype, torch.device("cpu"))
        buffer.copy_(torch.arange(length) % 7 * 2 + (256.0 if rank == 0 else 1.0))
        works.append((engine.allreduce(buffer, f"{dtype}.{length}"), buffer))
for work, buffer in works:
    work.wait()
    exact = torch.arange(len(buffer), dtype=torch.float64) % 7 * 2 + (256 + size - 1) / size
    difference = (buffer.double() - exact).abs().max().item()
    assert difference <= exact.max().item() * torch.finfo(buffer.dtype).eps / 2 * 1.01, (buffer.dtype, difference)

large = torch.full((10,), 60000.0 if rank else 1.0, dtype=torch.float16)
engine.allreduce(large, "large").wait()
assert torch.isfinite(large).all(), "the sum of float16 must not overflow where the mean does not"

wide = torch.full((10,), float(rank), dtype=torch.float32)
engine.allreduce(wide, "wire", wire=torch.bfloat16).wait()
np.testing.assert_allclose(wide, total / size, rtol=2**-8)

for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
    rows = torch.full((rank, 3), 1, dtype=dtype)
    assert engine.allgather(rows, "rows").shape == (sum(range(size)), 3)
    assert engine.allgather(rows, "rows").dtype == dtype
assert engine.allgather(torch.empty(0, 2), "none").shape == (0, 2)
order = engine.allgather(torch.tensor([rank, rank]), "order")
assert order.tolist() == [r for r in range(size) for _ in range(2)]

for tensor in (torch.full((3, 2), float(rank)).t(), torch.tensor(rank), torch.tensor([rank == 0])):
    engine.broadcast(tensor, "broadcast")
    assert torch.equal(tensor, torch.full_like(tensor, 1 if tensor.dtype == torch.bool else 0))

refused(comm.tensorflow, "HT-backend-unfit", backend="gloo")
if not torch.cuda.is_available():
    refused(lambda: (ht.shutdown(), ht.init("nccl")), "HT-backend-unavailable")
if sys.argv[1:] == ["stall"]:
    os.environ["HPCTRAIN_TIMEOUT"] = "2"
comm = ht.init("gloo")
print("engine agrees", flush=True)

if sys.argv[1:] and rank == 1:
    if sys.argv[1] == "die":
        os._exit(0)
    time.sleep(60)
comm.barrier()
