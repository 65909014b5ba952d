"""Curves that contradict the nodes of a prediction, and what curves of a part of them correct."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.control.predict.allreduce_time import Ranks, allreduce, check_curves
from hpctrain.control.predict.compute import Device
from hpctrain.control.predict.measurements import Curve
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.values import constants, drawn
from support.refusals import refused

GB = 10**9
HDR = 25e9


def ranks(*, nodes: int = 2, local: int = 8, adapters: int = 8, rate: float = HDR, device: str = "h100-sxm") -> Ranks:
    return Ranks(
        network=stated_network(nodes, adapters=adapters, bytes_per_s=rate),
        local=local,
        device=Device(name=device),
        engine="nccl",
    )


def curve(seconds: float, *, local: int = 8, hosts: int = 2) -> Curve:
    """One size, 1 GB."""
    return Curve(
        engine="nccl",
        ranks=local * hosts,
        hosts=hosts,
        points=((float(GB), seconds),),
        source="f",
    )


# Of 8 adapters with 25 GB/s each, 1 GB takes 5 ms at the least.
@pytest.mark.parametrize("seconds", [5e-3, 6e-3, 1.4e-2])
def test_what_the_links_can_have_carried(seconds: float) -> None:
    assert check_curves([curve(seconds)], ranks(), stated=True) == []


def test_faster_than_the_wire() -> None:
    seconds = 4.5e-3
    with refused("HT-calibration-implausible", rate="222 GB/s", links="200 GB/s") as wrong:
        check_curves([curve(seconds)], ranks(), stated=True)
    assert "--link" in wrong.value.hint
    (warning,) = check_curves([curve(seconds)], ranks(), stated=False)
    assert "--link" in warning


def test_the_trays_of_a_rack_are_joined_by_nvlink() -> None:
    # 4 GPUs with 4 adapters of 25 GB/s, and 10 GB/s more than these carry.
    own = ranks(nodes=36, adapters=4, local=4, device="gb200")
    rack = curve(GB / 425e9, local=4, hosts=18)
    with refused("HT-calibration-implausible", hosts=36):
        check_curves([replace(rack, hosts=36, ranks=144, points=((float(GB), GB / 18 / 425e9),))], own, stated=True)
    # What leaves a rack is spread over its trays.
    assert check_curves([replace(rack, hosts=36, ranks=144)], own, stated=True) == []
    joined = rack.in_rack(gpu("gb200").rack)
    assert (joined.hosts, joined.local, rack.in_rack(gpu("h100-sxm").rack)) == (1, 72, rack)
    one, two = (ranks(nodes=nodes, adapters=4, local=4, device="gb200") for nodes in (18, 36))
    assert check_curves([joined], one, stated=True) == []
    values = drawn(constants(), count=0)
    assert allreduce(GB, one, values, [joined])[0] == pytest.approx(GB / 425e9)
    # Two racks are not.
    assert allreduce(GB, two, values, [joined])[0] > 2 * GB / 425e9


def test_some_of_a_nodes_gpus_use_some_of_its_adapters() -> None:
    (warning,) = check_curves([curve(4.2e-2, local=1)], ranks(), stated=True)
    assert re.findall("[0-9]+", warning) == ["1", "8"]
    with refused("HT-calibration-implausible", ranks="1 of 8 ranks of a node"):
        check_curves([curve(1e-2, local=1)], ranks(), stated=True)


@pytest.mark.parametrize(("adapters", "local"), [(1, 1), (2, 1), (4, 1), (4, 3)])
def test_the_ranks_of_a_host_use_whole_adapters(adapters: int, local: int) -> None:
    """One of eight GPUs may have a node's only adapter to itself: 1 GB at 0.9 times 25 GB/s for each that is used."""
    used = {1: 1, 3: 2}[local]
    own, seconds = ranks(adapters=adapters), GB / (0.9 * used * HDR)
    (warning,) = check_curves([curve(seconds, local=local)], own, stated=True)
    assert re.findall("[0-9]+", warning) == [str(local), "8"]
    with refused("HT-calibration-implausible", ranks=f"{local} of 8 ranks of a node"):
        check_curves([curve(0.8 * seconds, local=local)], own, stated=True)


def test_curves_of_other_engines_do_not_count() -> None:
    own = Ranks(
        network=stated_network(2, adapters=1, bytes_per_s=1e9), local=2, device=Device(name="cpu"), engine="mpi"
    )
    assert check_curves([curve(1e-3)], own, stated=True) == []


def test_a_curve_of_one_host_leaves_the_links_alone() -> None:
    values = drawn(constants(), count=0)
    slow = ranks(rate=1e9)
    fast = curve(4e-3, hosts=1)
    assert allreduce(GB, slow, values, [fast])[0] == pytest.approx(float(allreduce(GB, slow, values)[0]))


def test_one_rank_of_each_host_says_nothing_of_what_is_within() -> None:
    values = drawn(constants(), count=0)
    links = curve(float(allreduce(GB, ranks(local=1), values)[0]), local=1)
    assert allreduce(GB, ranks(), values, [links, curve(0.5, hosts=1)])[0] == pytest.approx(0.5)
