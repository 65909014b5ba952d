"""Calls that mypy accepts and calls that it refuses; test_signatures.py has it read them, and nothing runs them.

A call that mypy wrongly accepts shows as an unused comment.
"""

from typing import Any, assert_type

import numpy as np
import torch
from torch.utils.data import DataLoader

import hpctrain as ht
from hpctrain.worker.adapters.torch.sharded_loader import ShardedLoader

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def accepted(model: torch.nn.Linear, optimizer: torch.optim.SGD, loader: DataLoader[Any], arrays: Arrays) -> None:
    pair = ht.distribute(model, optimizer, bucket_mb=4, compression="fp16", plan=ht.ParallelPlan(), comm=ht.init())
    assert_type(pair, tuple[torch.nn.Linear, torch.optim.SGD])
    assert_type(ht.shard(loader, evaluation=True, seed=1), ShardedLoader)
    assert_type(ht.mean_loss(torch.ones(()), 3), torch.Tensor)
    ht.shard(arrays, batch_size=32, shuffle=False, epoch=2)


def refused(model: torch.nn.Linear, optimizer: torch.optim.SGD, loader: DataLoader[Any], arrays: Arrays) -> None:
    ht.distribute(model, optimizer, bucket=4)  # type: ignore[call-overload]
    ht.distribute(model, optimizer, compression="fp8")  # type: ignore[call-overload]
    ht.shard(loader, evaluate=True)  # type: ignore[call-overload]
    ht.shard(arrays, batch_size=32, evaluation=True)  # type: ignore[call-overload]
    ht.sum_loss(torch.ones(()), ranks=2)  # type: ignore[call-overload]
