"""Refuses models and optimizers that cannot use a communicator, before they train wrongly."""

from __future__ import annotations

import torch

from hpctrain.common.errors import HpctrainError

# Builds before the release of 2.13 count as it.
SINCE_2_13 = torch.__version__ >= "2.13.0a0"

# Classes that average or divide gradients by themselves, by name so that none has to be imported.
_MODELS = {
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
    "DeepSpeedEngine": "DeepSpeed",
}
_OPTIMIZERS = {
    "horovod": "Horovod's DistributedOptimizer",
    "deepspeed": "an optimizer of DeepSpeed",
    "torch.distributed.optim": "a distributed optimizer of PyTorch",
}


def wrapper(module: torch.nn.Module) -> str | None:
    """The name of the wrapper that makes a module parallel; None for a plain module."""
    return next((_MODELS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _MODELS), None)


def check_model(model: torch.nn.Module) -> None:
    """Refuse a model that is already parallel."""
    for name, module in model.named_modules():
        if kind := wrapper(module):
            refuse_wrapped(f"{f'its part {name!r}' if name else 'the model'} is wrapped in {kind}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor":
            refuse_wrapped(f"{name!r} is a DTensor, of which this rank holds a part")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that reduces gradients by itself, or does not wait until they are reduced."""
    if hasattr(optimizer, "fused_backward"):
        raise HpctrainError(
            "HT-optimizer-not-supported",
            "{optimizer} updates parameters during its fused_backward(), by this rank's gradients, which are not "
            "reduced yet",
            "choose an optimizer that updates them in step()",
            optimizer=type(optimizer).__name__,
        )
    for kind in type(optimizer).__mro__:
        for package, words in _OPTIMIZERS.items():
            if f"{kind.__module__}.".startswith(f"{package}."):
                refuse_wrapped(f"the optimizer is {words}")


def refuse_wrapped(what: str) -> None:
    """Raise HpctrainError for something that reduces gradients a second time."""
    raise HpctrainError(
        "HT-gradients-reduced-twice",
        "gradients would be reduced twice: {reason}, and ht.distribute reduces them too",
        "give ht.distribute the plain model and optimizer, and leave the wrapper out; or leave ht.distribute out, if "
        "Lightning, Accelerate or the Trainer of Transformers wraps the model",
        exit_code=1,
        reason=what,
    )
