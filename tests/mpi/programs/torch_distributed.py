"""What the backend gloo promises beside its control plane: the engine on every type, and what comes after it.

A rank may run it under torchrun.
"""

from __future__ import annotations

import numpy as np
import torch
from situations import refused

import hpctrain as ht

for _ in range(2):
    comm = ht.init("gloo")
    # A script may keep its last work for as long as it runs.
    kept = [comm.torch().allreduce(torch.zeros(3, dtype=dtype), "kept") for dtype in (torch.float32, torch.float16)]
    for work in kept:
        work.wait()
    ht.shutdown()
    refused(comm.barrier, "HT-communicator-after-shutdown")

comm = ht.init("gloo")
rank, size = comm.rank, comm.size
total = size * (size - 1) / 2

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
print("engine agrees", flush=True)
