"""``ht.lightning``: strategies of Lightning and Fabric on the ranks of a run, however these were started.

They are Lightning's own DDP, over torch.distributed's default group of the run's backend. Under ``hpctrain run``
Lightning's ``strategy="ddp"`` gets that group too; these take devices and nodes from the run, whose hosts may have
different numbers of ranks, and work among ranks of mpirun, srun and torchrun that were started by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra
from hpctrain.worker.adapters.torch.default_group import join_default_group

try:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ModuleNotFoundError as error:
    raise missing_extra(error) or error from error

__all__ = ["FabricStrategy", "Strategy"]

NAME = "hpctrain"
_ABOUT = "DDP on the ranks of a run of hpctrain, over its backend"


class _Environment(TorchElasticEnvironment):  # type: ignore[misc]
    """Reads torchrun's variables, which :func:`join_default_group` sets where torchrun itself has not."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept them: the strategy has compared them with the run, whose hosts may have different numbers of ranks."""


class _RunStrategy:
    """What the strategies of Lightning and of Fabric have in common. Making one joins the run: it is collective."""

    strategy_name = NAME

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the strategy under its name."""
        registry.register(NAME, cls, description=_ABOUT, override=True)

    def __init__(self, **settings: Any) -> None:
        self._comm = comm = join_default_group()
        self._nodes = len(set(comm.allgather_object(comm.host)))
        super().__init__(cluster_environment=_Environment(), **settings)  # type: ignore[call-arg]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this host's ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        if not devices:
            self._parallel_devices = None
            return
        comm = self._comm
        # Lightning takes one CPU where the script leaves the number out.
        if len(devices) not in (1, comm.local_size):
            raise HpctrainError(
                "HT-lightning-wrong-devices",
                "strategy {strategy!r} with devices={devices}: the run has {ranks} on {host}",
                f"leave devices out, or start as many ranks: hpctrain run SCRIPT -np {len(devices)}",
                strategy=NAME,
                devices=len(devices),
                ranks=_count(comm.local_size, "rank"),
                host=comm.host,
            )
        found = list(devices)
        if len(found) == 1 and comm.local_size > 1:
            kind = found[0].type
            found = [torch.device(kind, n) if kind != "cpu" else torch.device(kind) for n in range(comm.local_size)]
        self._parallel_devices = found

    @property
    def num_nodes(self) -> int:
        """The number of the run's hosts."""
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes not in (1, self._nodes):
            raise HpctrainError(
                "HT-lightning-wrong-nodes",
                "strategy {strategy!r} with num_nodes={nodes}: the run is on {hosts}",
                "leave num_nodes out, or name as many hosts: hpctrain run SCRIPT -H HOST:SLOTS,…",
                strategy=NAME,
                nodes=nodes,
                hosts=_count(self._nodes, "host"),
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The run's ranks, since Lightning would assume equally many on each host."""
        return {"num_replicas": self._comm.size, "rank": self._comm.rank}


class Strategy(_RunStrategy, DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP on the ranks of a run: ``Trainer(strategy=ht.lightning.Strategy())``, or ``"hpctrain"``.

    ``devices`` and ``num_nodes`` can be omitted from the Trainer. A single process is a run of one rank.

    Args:
        settings: those of Lightning's ``DDPStrategy``, such as ``find_unused_parameters``; its process group, its
            cluster environment and its devices are the run's.

    Raises:
        HpctrainError: the run's backend has no process groups; or, from the Trainer, other devices or nodes than the
            run has.
    """

    def setup_distributed(self) -> None:
        """Join the run's group, which may have been destroyed since."""
        join_default_group()
        self.set_world_ranks()


class FabricStrategy(_RunStrategy, FabricDDP):  # type: ignore[misc]
    """Like :class:`Strategy`, for Fabric: ``Fabric(strategy=ht.lightning.FabricStrategy())``, or ``"hpctrain"``."""

    def _setup_distributed(self) -> None:
        join_default_group()
        self._set_world_ranks()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


Strategy.register_strategies(StrategyRegistry)
FabricStrategy.register_strategies(STRATEGY_REGISTRY)
