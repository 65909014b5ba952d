"""The energy that a run's nodes and switches draw."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The energy of a run, (columns,) each; None for figures that need its length or the grid where it is not known.

    Attributes:
        kwh: what all nodes together draw.
        facility_kwh: of nodes and switches, with the cooling and what else the site spends for each (PUE).
        joules_per_sample: what the nodes draw, without switches and cooling.
        kg_co2: kilograms of CO2 equivalent for ``facility_kwh``.
    """

    node_w: Floats
    kwh: Floats | None
    facility_kwh: Floats | None
    joules_per_sample: Floats
    kg_co2: Floats | None


FIGURES = tuple(field.name for field in fields(Energy))


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a run draws its power.

    Attributes:
        pue: power usage effectiveness: the site's power over that of its machines.
        g_per_kwh: carbon intensity of the grid in grams of CO2 equivalent; None if not known.
    """

    pue: float = 1.0
    g_per_kwh: float | None = None


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The nodes of a run and their network.

    Attributes:
        gpu: not ``cpu``: the power of hosts without GPUs is not modelled.
        switch_ports: the number of ports of all switches together.
    """

    gpu: str
    gpus_per_node: int
    nodes: int
    switch_ports: float = 0.0


def energy(
    values: Values,
    machines: Machines,
    *,
    busy: Floats,
    seconds: Floats | None,
    samples_per_s: Floats,
    site: Site,
) -> Energy:
    """The energy of a run.

    A GPU draws its idle power, and what is between that and a share of its limit for as long as it is full. The rest
    of a node (cores, memory, fans) draws what GPUs at their full power leave of its share, whatever they do.

    Args:
        busy: share of the time for which GPUs are full, (columns,).
        seconds: of the run, (columns,); None if not known.
    """
    gpu, gpus_per_node, nodes = machines.gpu, machines.gpus_per_node, machines.nodes
    idle, full = values[f"{gpu}.idle_w"], values[f"{gpu}.power_w"] * values["full_power"]
    share = values["gpu_power_share"].clip(max=0.95)
    rest = gpus_per_node * full * (1 - share) / share
    node_w = rest + gpus_per_node * (idle + (full - idle) * busy)
    joules_per_sample = node_w * nodes / samples_per_s
    if seconds is None:
        return Energy(node_w=node_w, kwh=None, facility_kwh=None, joules_per_sample=joules_per_sample, kg_co2=None)
    kwh = node_w * nodes * seconds / _JOULES_PER_KWH
    switches = values["switch_port_w"] * machines.switch_ports * seconds / _JOULES_PER_KWH
    facility = (kwh + switches) * site.pue
    return Energy(
        node_w=node_w,
        kwh=kwh,
        facility_kwh=facility,
        joules_per_sample=joules_per_sample,
        kg_co2=None if site.g_per_kwh is None else facility * site.g_per_kwh / 1000,
    )
