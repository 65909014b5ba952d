"""The nodes and the network of a prediction, from what the user states about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.compute import CPU
from hpctrain.control.predict.network import has_cables, networks, stated_network
from hpctrain.control.topology.records import LANE_GBIT

if TYPE_CHECKING:
    from hpctrain.common.cluster.node_map import NodeMap
    from hpctrain.control.predict.network import Network
    from hpctrain.control.schedulers.profile import NodeProfile

_DEFAULT_RATE = 4 * LANE_GBIT["HDR"] * 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the user states about the nodes; None for what is not stated.

    Attributes:
        gpu: a name of :func:`hpctrain.common.cluster.gpu_models.gpus`, or ``cpu``.
        adapters: network adapters of a node that the ranks use.
        link_bytes_per_s: the rate of an adapter, in one direction.
        rdma: whether the adapters support RDMA.
    """

    gpu: str | None = None
    gpus_per_node: int | None = None
    adapters: int | None = None
    link_bytes_per_s: float | None = None
    fabric: Path | None = None
    routes: Path | None = None
    rdma: bool = True

    def like(self, node: NodeMap) -> Hardware:
        """The same with the GPUs and adapters of a node map, and their speed, in place of what was not stated.

        Adapters of different speeds count as adapters of the mean speed.
        """
        speeds = [adapter.gbit for adapter in node.training_adapters if adapter.gbit is not None]
        known = speeds and len(speeds) == len(node.training_adapters)
        return replace(
            self,
            gpus_per_node=self.gpus_per_node or len(node.gpus) or None,
            adapters=self.adapters or len(node.training_adapters) or None,
            link_bytes_per_s=self.link_bytes_per_s or (sum(speeds) / len(speeds) * 1e9 / 8 if known else None),
        )

    def completed(self, profile: NodeProfile) -> Hardware:
        """The same with what a cluster's profile knows of a node in place of what was not stated."""
        rate = profile.link_gbit * 1e9 / 8 if profile.link_gbit else None
        return replace(
            self,
            gpu=self.gpu or profile.gpu,
            gpus_per_node=self.gpus_per_node or profile.gpus or None,
            adapters=self.adapters or profile.adapters,
            link_bytes_per_s=self.link_bytes_per_s or rate,
        )

    @property
    def named_gpu(self) -> str:
        """The GPU.

        Raises:
            HpctrainError: none was stated.
        """
        if self.gpu is None:
            raise HpctrainError(
                "HT-argument-missing",
                "which GPUs is the prediction for?",
                "--gpu NAME, or --cluster PROFILE of one that names them",
            )
        return self.gpu

    @property
    def local(self) -> int:
        """Ranks of a node.

        Raises:
            HpctrainError: not stated.
        """
        if self.gpus_per_node is None:
            raise HpctrainError(
                "HT-argument-missing",
                "how many GPUs has a node, or on cpu, how many ranks share its cores?",
                "--gpus-per-node N",
            )
        return self.gpus_per_node

    @property
    def states_links(self) -> bool:
        """Whether adapters and their rate are stated, rather than assumed."""
        return self.fabric is not None or (self.adapters is not None and self.link_bytes_per_s is not None)

    def networks(self, counts: Sequence[int]) -> tuple[list[Network], tuple[str, ...]]:
        """The network of each number of nodes, and what had to be assumed.

        Raises:
            HpctrainError: a fabric that cannot be read, that has fewer hosts, or whose links have no speed.
        """
        if self.fabric is None and self.routes is not None:
            raise HpctrainError("HT-option-needs-another", "--routes is of a fabric's file", "add --fabric FILE")
        adapters, rate = self.adapters or self._usual_adapters(), self.link_bytes_per_s or _DEFAULT_RATE
        if self.fabric is None:
            found = self._stated(counts, adapters, rate)
            return found, self._assumed(adapters, rate, "that no link is shared (--fabric)") if max(counts) > 1 else ()
        from hpctrain.control.topology.build import read_fabric

        fabric = read_fabric(self.fabric, self.routes)
        if has_cables(fabric):
            found = networks(
                fabric,
                counts,
                adapters_per_host=self.adapters,
                bytes_per_s=self.link_bytes_per_s,
            )
            return found, fabric.warnings
        if max(counts) > len(fabric.hosts):
            raise HpctrainError(
                "HT-hosts-too-few",
                "{nodes} nodes on a fabric that has {hosts} hosts",
                f"valid: 1 to {len(fabric.hosts)}",
                nodes=max(counts),
                hosts=len(fabric.hosts),
            )
        without = f"that no link is shared, as {self.fabric} has no cables"
        return self._stated(counts, adapters, rate), (*fabric.warnings, *self._assumed(adapters, rate, without))

    def _stated(self, counts: Sequence[int], adapters: int, rate: float) -> list[Network]:
        return [stated_network(count, adapters=adapters, bytes_per_s=rate) for count in counts]

    def _usual_adapters(self) -> int:
        """One adapter for each GPU, as in nodes that are built for training; one for a node without GPUs."""
        return 1 if self.gpu == CPU else self.local

    def _assumed(self, adapters: int, rate: float, shared: str) -> tuple[str, ...]:
        parts = []
        if self.adapters is None:
            parts.append(f"{adapters} adapters per node (--adapters-per-node)")
        if self.link_bytes_per_s is None:
            parts.append(f"{rate * 8 / 1e9:g} Gbit/s each (--link)")
        return (f"assumed about the network: {', '.join([*parts, shared])}",)
