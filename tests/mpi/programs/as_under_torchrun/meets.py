"""Ranks, and processes that a rank starts, meet at the port that the launcher names."""

import os

import torch.distributed as dist
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, 2, rank == 0)
store.set(f"from {rank}", "here")
with open(f"met-{rank}.txt", "w") as file:
    file.write(store.get(f"from {1 - rank}").decode())
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
with open(f"called-{rank}.txt", "w") as file:
    print(rpc.rpc_sync(f"worker{1 - rank}", divmod, args=(7, 4)), file=file)
rpc.shutdown()
