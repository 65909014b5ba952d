"""Train one PyTorch or Keras script on one process or on a thousand.

The five lines that change in a training script::

    import hpctrain as ht

    comm = ht.init()
    model, optimizer = ht.distribute(model, optimizer)
    loader = ht.shard(loader)

Importing this package imports neither a framework nor MPI: every name below is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.run.stopping import RESUMABLE

if TYPE_CHECKING:
    import hpctrain.worker.adapters.keras as keras
    from hpctrain.worker.adapters import average_statistics as average_statistics
    from hpctrain.worker.adapters import distribute as distribute
    from hpctrain.worker.adapters import gather as gather
    from hpctrain.worker.adapters import log as log
    from hpctrain.worker.adapters import mean as mean
    from hpctrain.worker.adapters import mean_loss as mean_loss
    from hpctrain.worker.adapters import no_sync as no_sync
    from hpctrain.worker.adapters import resumed_at as resumed_at
    from hpctrain.worker.adapters import shard as shard
    from hpctrain.worker.adapters import sum_loss as sum_loss
    from hpctrain.worker.adapters.torch.batch import BatchTensor as BatchTensor
    from hpctrain.worker.adapters.torch.parallel import ParallelPlan as ParallelPlan
    from hpctrain.worker.adapters.torch.parallel import Pipeline as Pipeline
    from hpctrain.worker.adapters.torch.parallel import mesh as mesh
    from hpctrain.worker.comm import init as init
    from hpctrain.worker.comm import should_stop as should_stop
    from hpctrain.worker.comm import shutdown as shutdown
    from hpctrain.worker.tracing.network_trace import trace as trace

__version__ = "0.2.0"

_HOME = {
    "BatchTensor": "hpctrain.worker.adapters.torch.batch",
    "ParallelPlan": "hpctrain.worker.adapters.torch.parallel",
    "Pipeline": "hpctrain.worker.adapters.torch.parallel",
    "average_statistics": "hpctrain.worker.adapters",
    "distribute": "hpctrain.worker.adapters",
    "gather": "hpctrain.worker.adapters",
    "init": "hpctrain.worker.comm",
    "log": "hpctrain.worker.adapters",
    "mean": "hpctrain.worker.adapters",
    "mean_loss": "hpctrain.worker.adapters",
    "mesh": "hpctrain.worker.adapters.torch.parallel",
    "no_sync": "hpctrain.worker.adapters",
    "resumed_at": "hpctrain.worker.adapters",
    "shard": "hpctrain.worker.adapters",
    "should_stop": "hpctrain.worker.comm",
    "shutdown": "hpctrain.worker.comm",
    "sum_loss": "hpctrain.worker.adapters",
    "trace": "hpctrain.worker.tracing.network_trace",
}
_MODULES = ("keras",)
# What other libraries have as functions of their module.
_OF_INIT = (
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast_object",
    "host",
    "local_rank",
    "local_size",
    "rank",
    "size",
)

__all__ = [
    "RESUMABLE",
    "BatchTensor",
    "HpctrainError",
    "ParallelPlan",
    "Pipeline",
    "__version__",
    "average_statistics",
    "distribute",
    "gather",
    "init",
    "keras",
    "log",
    "mean",
    "mean_loss",
    "mesh",
    "no_sync",
    "resumed_at",
    "shard",
    "should_stop",
    "shutdown",
    "sum_loss",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hpctrain.worker.adapters.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    missing = f"module 'hpctrain' has no attribute {name!r}"
    if name in _OF_INIT:
        missing += f": hpctrain.init().{name} has it"
    elif not name.startswith("_"):
        missing += f": {nearest(name, (each for each in __all__ if not each.startswith('_')))}"
    raise AttributeError(missing)
