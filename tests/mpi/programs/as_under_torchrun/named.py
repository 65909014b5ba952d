"""The group has the name that the script asked for, by which libraries choose what they do."""

import torch.distributed as dist

dist.init_process_group("gloo")
name = dist.get_backend()
group = dist.new_group([0, 1], backend=name)
dist.monitored_barrier(group)
known = name in ("nccl", "gloo", "mpi") and name is dist.Backend.GLOO and dist.is_backend_available(name)
with open(f"names-{dist.get_rank()}.txt", "w") as file:
    print(name, known, dist.get_backend(group), file=file)
dist.destroy_process_group()
