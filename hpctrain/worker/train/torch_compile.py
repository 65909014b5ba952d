"""Compiles a recipe's network by torch.compile: each repeated block by itself, or the whole of a network without any.

Blocks of one class that differ in nothing but their parameters share one compilation, so that a GPT of any depth takes
as long as one block. What is compiled is a block's ``forward`` in training. Around it everything stays as it is: the
names of parameters, the hooks by which FSDP2 gathers and ``ht.distribute`` reduces, recomputation, and evaluations,
which run as in a run that is not compiled.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.compatibility import uncompilable
from hpctrain.common.recipes.families import network
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.comm import Communicator
from hpctrain.worker.train.script_variables import CACHE, code_folder

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OFF = "--set compile=off runs the network as it is"
# PyTorch names itself where it reads this.
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_MOST_THREADS = 8
# The blocks of a ResNet-50 have eight kinds, times the sizes of images that grow, which a batch of another size or an
# averaged model doubles; PyTorch gives up on a function after eight.
_KINDS = 128
# The oldest GPUs that Triton has code for.
_TRITON = (7, 0)


def is_compiled(recipe: Recipe, comm: Communicator, device: torch.device) -> bool:
    """Whether a run compiles its network. Collective with ``compile: auto``, so that all ranks do the same.

    Raises:
        HpctrainError: the recipe asks for it, and this rank has no compiler.
    """
    if recipe.compile == "off":
        return False
    missing = _missing(device)
    if recipe.compile == "on" and missing:
        raise HpctrainError(
            "HT-compiler-missing", "compile: on needs {missing}, which is not there", _OFF, missing=missing
        )
    if recipe.compile == "on":
        return True
    able = device.type == "cuda" and missing is None and uncompilable(recipe) is None
    return bool(comm.allreduce(np.array([float(able)]), "min")[0])


def _missing(device: torch.device) -> str | None:
    """What PyTorch's compiler lacks here."""
    on_gpu = device.type == "cuda"
    if on_gpu and importlib.util.find_spec("triton") is None:
        return "Triton"
    if on_gpu and torch.cuda.get_device_capability(device) < _TRITON:
        return "a GPU of compute capability 7.0"
    variable, usual = ("CC", ("cc", "gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    named = shlex.split(os.environ.get(variable, ""))[:1]
    return None if any(map(shutil.which, named or usual)) else f"a compiler ({', '.join(named or usual)})"


def compile_network(model: nn.Module, recipe: Recipe, comm: Communicator) -> None:
    """Have a network compiled when its first batch comes.

    Raises:
        HpctrainError: the folder for compiled code cannot be made, or others could write into it.
    """
    if CACHE not in os.environ:
        os.environ[CACHE] = str(code_folder())
    # PyTorch would start a process for each core in each rank.
    cores = len(os.sched_getaffinity(0)) // comm.local_size
    os.environ.setdefault(_THREADS, str(max(1, min(cores, _MOST_THREADS))))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS)
    kind = network(recipe.model.name).block
    for block in [module for module in model.modules() if type(module).__name__ == kind] or [model]:
        plain = block.forward
        # Blocks share their code, so that their sizes differ. Kernels for sizes that are known are faster.
        block.forward = functools.partial(_run, block, torch.compile(plain, dynamic=False), plain)


def _run(block: nn.Module, compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:
    return (compiled if block.training else plain)(*inputs)


def reporting(function: _Function, model: str) -> _Function:
    """A function whose errors of PyTorch's compiler are told as those of a model."""

    @functools.wraps(function)
    def reported(*arguments: Any, **settings: Any) -> Any:
        try:
            return function(*arguments, **settings)
        except RuntimeError as error:
            if (cause := _of_compiler(error)) is None:
                raise
            lines = str(cause).strip().splitlines() or [""]
            raise HpctrainError(
                "HT-compile-failed",
                "PyTorch cannot compile {model}: {kind}: {reason}",
                _OFF,
                exit_code=1,
                model=model,
                kind=type(cause).__name__,
                reason=lines[0],
            ) from error

    return reported  # type: ignore[return-value]


def _of_compiler(error: BaseException | None) -> BaseException | None:
    """The first of an error and its causes that PyTorch's compiler raised."""
    while error is not None and not type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.")):
        error = error.__cause__ or error.__context__
    return error
