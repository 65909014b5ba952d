"""Whole batches: tensors whose rows the ranks divide, and that compute as those of one process.

:mod:`tensor` has the class and what any function does with it, the modules of rules what some functions do better, and
:mod:`edge` what a distributed model does.
"""

from typing import Any

from hpctrain.worker.adapters.torch.batch import reductions, shapes  # noqa: F401 - each module registers its rules
from hpctrain.worker.adapters.torch.batch.derivatives import dispatch_backward, gather_for_own_functions, watch_engine
from hpctrain.worker.adapters.torch.batch.edge import watch_models
from hpctrain.worker.adapters.torch.batch.ranks import Rows
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor
from hpctrain.worker.comm.after_import import change_after_import

__all__ = ["BatchTensor", "Rows", "install"]


def install() -> None:
    """Make PyTorch treat batches as this package says: in models, in functions of scripts and in asked gradients."""
    watch_models()
    gather_for_own_functions()
    dispatch_backward()
    watch_engine()
    change_after_import({"torch._dynamo": _leave_to_eager})


def _leave_to_eager(dynamo: Any) -> None:
    """Let a compiler leave a script's functions of batches alone. Models that it compiles get plain tensors."""
    apply = BatchTensor.__dict__["__torch_function__"].__func__
    BatchTensor.__torch_function__ = classmethod(dynamo.disable(apply))  # type: ignore[assignment, method-assign]
