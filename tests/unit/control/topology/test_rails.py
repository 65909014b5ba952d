"""Adapters are paired by the rail that they are on, whatever their number on their host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.control.topology.fabric import Fabric, components
from hpctrain.control.topology.placement import rail_adapters, report
from hpctrain.control.topology.routes import Routes
from support.topology.small_fabric import small_fabric


def paired(fabric: Fabric, hosts: list[int]) -> list[list[str]]:
    return [[fabric.names[adapter] for adapter in row] for row in rail_adapters(fabric, hosts)]


def rail_optimised(*lost: str) -> Fabric:
    """Two groups of three hosts, each with a leaf for each of its four rails."""
    cables = [(f"h{host} m{rail}", f"leaf{host // 3 * 4 + rail}") for host in range(6) for rail in range(4)]
    cables = [cable for cable in cables if cable[0] not in lost]
    return small_fabric([*cables, *((f"leaf{leaf}", f"spine{spine}") for leaf in range(8) for spine in range(4))])


@pytest.mark.parametrize("lost", range(4))
def test_a_host_without_an_adapter_leaves_its_rail_out_for_all(lost: int) -> None:
    fabric = rail_optimised(f"h1 m{lost}")
    names = paired(fabric, [0, 1, 4])
    assert names == [[f"h{host} m{rail}" for rail in range(4) if rail != lost] for host in (0, 1, 4)]
    assert paired(fabric, [0, 2]) == [[f"h{host} m{rail}" for rail in range(4)] for host in (0, 2)]


def test_the_placement_names_who_lacks_adapters_and_rings_stay_on_their_rails() -> None:
    fabric = rail_optimised("h1 m0")
    found = report(fabric, [0, 1, 2])
    assert (found.rails, found.short) == (3, ("h1",))
    one, other = rail_adapters(fabric, [0, 1])
    assert Routes(fabric).paths(one, other).link.size == 3 * 2, "by way of the rails' own leaves"
    assert report(rail_optimised(), [0, 1, 2]).short == ()


def test_devices_that_a_host_counts_otherwise() -> None:
    cables = [("h0 m0", "leaf0"), ("h0 m1", "leaf1"), ("h1 m0", "leaf1"), ("h1 m1", "leaf0")]
    assert paired(small_fabric(cables), [0, 1]) == [["h0 m0", "h0 m1"], ["h1 m1", "h1 m0"]]


def test_planes_tell_rails_where_no_host_on_the_same_leaves_is_whole() -> None:
    cables = [("h0 m0", "leaf0"), ("h0 m1", "leaf1"), ("h1 m1", "leaf2"), ("leaf2", "spine1"), ("leaf1", "spine1")]
    fabric = small_fabric([*cables, ("leaf0", "spine0")])
    fabric = replace(fabric, subnet=components(len(fabric.names), fabric.source, fabric.target))
    assert paired(fabric, [0, 1]) == [["h0 m1"], ["h1 m1"]]
    assert report(fabric, [0, 1]).rails == 1


def test_without_a_rail_in_common_the_order_of_names_counts() -> None:
    fabric = rail_optimised("h0 m0", "h0 m1", "h1 m2", "h1 m3")
    assert paired(fabric, [0, 1]) == [["h0 m2", "h0 m3"], ["h1 m0", "h1 m1"]]
