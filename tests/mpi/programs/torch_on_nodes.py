"""Trains cases of torch_equivalence with the MPI engine on several nodes, and counts what leaves them.

``python torch_on_nodes.py OUT CASE …`` writes OUT-RANK.npz with each case's parameters; ``nodes``, how many nodes the
engine sees; and of each case ``CASE sent``, the bytes that this rank handed to MPI for other nodes, and ``CASE
reduced``, the size of all gradients that it reduced.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch_equivalence import CASES, UPDATES, distributed

import hpctrain as ht

_WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}


def gradients(name: str) -> int:
    """Bytes of a case's gradients in all of its updates, and of their flags, one a parameter."""
    case = CASES[name]
    parameters = [parameter for parameter in case.network().parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in parameters) + len(parameters)
    return UPDATES * elements * _WIRE.get(case.compression, case.dtype).itemsize


def main() -> None:
    torch.set_num_threads(1)
    out, *names = sys.argv[1:]
    comm = ht.init("mpi")
    reducer = comm._reducer
    found = {"nodes": reducer.node.count}
    for name in names:
        before = reducer.sent_bytes
        found[name] = distributed(name)
        found[f"{name} sent"] = reducer.sent_bytes - before
        found[f"{name} reduced"] = gradients(name)
    np.savez(f"{out}-{comm.rank}.npz", **found)


if __name__ == "__main__":
    main()
