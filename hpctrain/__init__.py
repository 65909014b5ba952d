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

from hpctrain.errors import HpctrainError
from hpctrain.run.stopping import RESUMABLE

if TYPE_CHECKING:
    from hpctrain.adapters import average_statistics as average_statistics
    from hpctrain.adapters import distribute as distribute
    from hpctrain.adapters import gather as gather
    from hpctrain.adapters import join as join
    from hpctrain.adapters import keras as keras
    from hpctrain.adapters import lightning as lightning
    from hpctrain.adapters import log as log
    from hpctrain.adapters import mean as mean
    from hpctrain.adapters import mean_loss as mean_loss
    from hpctrain.adapters import no_sync as no_sync
    from hpctrain.adapters import shard as shard
    from hpctrain.adapters import sum_loss as sum_loss
    from hpctrain.adapters.torch.parallel import ParallelPlan as ParallelPlan
    from hpctrain.adapters.torch.parallel import Pipeline as Pipeline
    from hpctrain.adapters.torch.parallel import mesh as mesh
    from hpctrain.comm import init as init
    from hpctrain.comm import should_stop as should_stop
    from hpctrain.comm import shutdown as shutdown
    from hpctrain.tracing.trace import trace as trace

__version__ = "0.1.0"

_HOME = {
    "ParallelPlan": "hpctrain.adapters.torch.parallel",
    "Pipeline": "hpctrain.adapters.torch.parallel",
    "average_statistics": "hpctrain.adapters",
    "distribute": "hpctrain.adapters",
    "gather": "hpctrain.adapters",
    "init": "hpctrain.comm",
    "join": "hpctrain.adapters",
    "log": "hpctrain.adapters",
    "mean": "hpctrain.adapters",
    "mean_loss": "hpctrain.adapters",
    "mesh": "hpctrain.adapters.torch.parallel",
    "no_sync": "hpctrain.adapters",
    "shard": "hpctrain.adapters",
    "should_stop": "hpctrain.comm",
    "shutdown": "hpctrain.comm",
    "sum_loss": "hpctrain.adapters",
    "trace": "hpctrain.tracing.trace",
}
_MODULES = ("keras", "lightning")

__all__ = [
    "RESUMABLE",
    "HpctrainError",
    "ParallelPlan",
    "Pipeline",
    "__version__",
    "average_statistics",
    "distribute",
    "gather",
    "init",
    "join",
    "keras",
    "lightning",
    "log",
    "mean",
    "mean_loss",
    "mesh",
    "no_sync",
    "shard",
    "should_stop",
    "shutdown",
    "sum_loss",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hpctrain.adapters.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
