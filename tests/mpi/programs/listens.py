"""Ranks that train one step with each backend, and write where they listen: ``listens.py FOLDER BACKEND …``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import torch

import hpctrain

folder, *backends = sys.argv[1:]
found = {}
for backend in backends:
    comm = hpctrain.init(backend)
    model = torch.nn.Linear(4, 4)
    model, optimizer = hpctrain.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found[backend] = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type.name == "SOCK_DGRAM" and not connection.raddr)
    ]
    Path(folder, f"rank-{comm.rank}.json").write_text(json.dumps(found))
    # Nobody has left, and closed what it had.
    comm.barrier()
    hpctrain.shutdown()
