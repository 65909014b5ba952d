"""Lets Lightning, Accelerate and the Hugging Face Trainer find a run of ``hpctrain run`` as they find one of torchrun.

They distribute a training by themselves over torch.distributed, if the variables of a launcher that they know say so.
A script that imports one of them gets torchrun's variables, and the default group that they ask torch.distributed for
is that of the run's backend: hpctrain's own over ``mpi``. Other scripts get nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hpctrain.common.cluster.launcher import TORCHRUN, detect
from hpctrain.common.run.plan import Plan
from hpctrain.worker.comm.torchrun import torchrun_variables

# Transformers is not listed because it imports Accelerate.
FRAMEWORKS = frozenset(("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"))
_IN_HOST_MEMORY = ("gloo", "mpi")


def serve_frameworks(plan: Plan, rank: int) -> None:
    """Prepare this rank for a framework, as soon as the script imports one. Called before the script begins."""
    capable = plan.capabilities
    if plan.script and capable and capable.joins_ranks and capable.has_meshes:
        variables = framework_variables(plan, rank)
        launcher = detect()
        if launcher and launcher.name == TORCHRUN:
            # torchrun's own variables stay: they say where its store is.
            variables = {name: value for name, value in variables.items() if _is_of_a_framework(name)}
        sys.meta_path.insert(0, _Watch(variables))


def framework_variables(plan: Plan, rank: int) -> dict[str, str]:
    """torchrun's variables for a rank of a plan, and what the frameworks would not find out by themselves."""
    homes = [(node, local) for node, host in enumerate(plan.hosts) for local in range(host.slots)]
    node, local_rank = homes[rank]
    local_size, nodes = plan.hosts[node].slots, len(plan.hosts)
    if plan.start.share_gpus:
        # Each rank sees one GPU, so that it is to a framework like the only rank of a node.
        local_rank, local_size, node, nodes = 0, 1, rank, plan.ranks
    variables = torchrun_variables(
        rank=rank,
        size=plan.ranks,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        address=(plan.hosts[0].host, 0),
    )
    # Defaults of Lightning's Trainer where the script names none. Its own would be one CPU, or all GPUs.
    variables |= {"PL_TRAINER_DEVICES": str(local_size), "PL_TRAINER_NUM_NODES": str(nodes)}
    if plan.backend in _IN_HOST_MEMORY:
        # Accelerate distributes on CPUs only when asked; both would choose GPUs, which these backends cannot use.
        variables |= {"PL_TRAINER_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    return variables


def _is_of_a_framework(name: str) -> bool:
    return name.startswith(("PL_", "ACCELERATE_"))


class _Watch(MetaPathFinder):
    """Prepares this process before the first of the frameworks is imported; looking for one is not an import."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._ready = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FRAMEWORKS or self._ready:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def prepared(module: ModuleType) -> None:
            self._prepare()
            execute(module)

        spec.loader.exec_module = prepared  # type: ignore[method-assign]
        return spec

    def _prepare(self) -> None:
        if self._ready:
            return
        self._ready = True
        from hpctrain.worker.adapters.torch.default_group import give_default_group

        for name, value in self._variables.items():
            # What the user has set stays, unless it is about which rank this is.
            if _is_of_a_framework(name):
                os.environ.setdefault(name, value)
            else:
                os.environ[name] = value
        give_default_group()
