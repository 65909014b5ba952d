"""Compiles a recipe's network by torch.compile: each repeated block by itself, or the whole network.

Blocks of one class that differ in nothing but their parameters share one compilation, so that a GPT of any depth takes
as long as one block. What is compiled is a block's ``forward`` in training. Around it everything stays as it is: the
names of parameters, the hooks by which FSDP2 gathers and ``ht.distribute`` reduces, recomputation, and evaluations,
which run as in a run that is not compiled. A network of images is compiled as a whole for one rank. For several, all
of its gradients would come at the end of the backward pass, and none be reduced meanwhile.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._triton import has_triton

from hpctrain.common.recipes.compatibility import uncompilable
from hpctrain.common.recipes.families import network
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.comm import Communicator
from hpctrain.worker.train.script_variables import CACHE, code_folder

# PyTorch names itself where it reads this.
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_MOST_THREADS = 8
# The blocks of a ResNet-50 have eight kinds, times the sizes of images that grow, which a batch of another size or an
# averaged model doubles; PyTorch gives up on a function after eight.
_KINDS = 128


def is_compiled(recipe: Recipe, comm: Communicator, device: torch.device) -> bool:
    """Whether a run compiles its network. Collective with ``compile: auto``, so that all ranks do the same."""
    if recipe.compile != "auto":
        return recipe.compile != "off"
    able = device.type == "cuda" and uncompilable(recipe) is None and has_triton() and _has_c_compiler()
    return bool(comm.allreduce(np.array([float(able)]), "min")[0])


def _has_c_compiler() -> bool:
    """Whether there is a C compiler, by which Triton makes what launches a kernel."""
    named = shlex.split(os.environ.get("CC", ""))[:1]
    return any(map(shutil.which, named or ("cc", "gcc", "clang")))


def compile_network(model: nn.Module, recipe: Recipe, comm: Communicator) -> None:
    """Have a network compiled when its first batch comes.

    With ``compile: graphs``, PyTorch replays what it compiled as CUDA graphs: a whole one is launched at once, which
    saves the processor's time. On CPUs it does not.

    Raises:
        HpctrainError: the folder for compiled code cannot be made, or others could write into it.
    """
    if CACHE not in os.environ:
        os.environ[CACHE] = str(code_folder())
    # PyTorch would start a process for each core in each rank.
    cores = len(os.sched_getaffinity(0)) // comm.local_size
    os.environ.setdefault(_THREADS, str(max(1, min(cores, _MOST_THREADS))))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS)
    kind = None if compiles_whole(recipe, comm) else network(recipe.model.name).block
    mode = "reduce-overhead" if recipe.compile == "graphs" else None
    for block in [module for module in model.modules() if type(module).__name__ == kind] or [model]:
        plain = block.forward
        # Blocks share their code, so that their sizes differ. Kernels for sizes that are known are faster.
        block.forward = functools.partial(_run, block, torch.compile(plain, dynamic=False, mode=mode), plain)


def compiles_whole(recipe: Recipe, comm: Communicator) -> bool:
    """Whether a network is compiled at once, and not block by block."""
    return comm.size == 1 and not recipe.model.family.predicts_tokens


def _run(block: nn.Module, compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:
    return (compiled if block.training else plain)(*inputs)
