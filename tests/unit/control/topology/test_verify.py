"""Measurements against the fabric, with made-up measurements: what is slow is named, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.verify import End, Fault, Flow, adapter_of, compare, rounds
from support.refusals import refused
from support.topology.small_fabric import two_levels

SPEED = 50e9


def fast(fabric: Fabric, speed: float = SPEED) -> Fabric:
    return replace(fabric, bandwidth=np.full(len(fabric.source), speed))


def measured(
    fabric: Fabric,
    *,
    rails: int = 1,
    of_host: Callable[[str], float] = lambda host: 1.0,
    of_adapter: Callable[[str], float] = lambda adapter: 1.0,
    of_link: Callable[[str, str], float] = lambda source, target: 1.0,
) -> list[Flow]:
    """What a fabric would show: each flow gets nine tenths of its share of the narrowest link, less what is broken."""
    ends = [
        End(host=host, device=fabric.names[adapter].split()[1])
        for number, host in enumerate(fabric.hosts)
        for adapter in fabric.adapters(number)[:rails]
    ]
    routes = Routes(fabric)
    flows = []
    for number, pairs in enumerate(rounds(len(fabric.hosts), rails)):
        source = np.array([adapter_of(fabric, ends[one]) for one, _ in pairs])
        target = np.array([adapter_of(fabric, ends[other]) for _, other in pairs])
        load = routes.loads(source, target)
        paths = routes.paths(source, target)
        for flow, (one, other) in enumerate(pairs):
            links = paths.link[paths.start[flow] : paths.start[flow + 1]]
            names = [(fabric.names[fabric.source[link]], fabric.names[fabric.target[link]]) for link in links]
            share = min(
                fabric.bandwidth[link] / load[link] * of_link(*name) for link, name in zip(links, names, strict=True)
            )
            both = (ends[one], ends[other])
            share *= min(of_host(end.host) for end in both) * min(of_adapter(str(end)) for end in both)
            flows.append(Flow(round=number, source=both[0], target=both[1], bandwidth=0.9 * share))
    return flows


def named(faults: tuple[Fault, ...]) -> list[tuple[str, str]]:
    return [*dict.fromkeys((fault.kind, fault.name) for fault in faults)]


FABRIC = fast(two_levels([4, 4, 4], spines=2))


def test_all_good():
    assert compare(measured(FABRIC), FABRIC) == ()


def test_shared_links_are_no_fault():
    # one uplink for four hosts: flows across leaves get a quarter, as they should
    narrow = fast(two_levels([4, 4], spines=1))
    flows = measured(narrow)
    assert max(flow.bandwidth for flow in flows) > 2 * min(flow.bandwidth for flow in flows)
    assert compare(flows, narrow) == ()
    assert compare(flows)


def test_a_tree_of_names_promises_no_bandwidth():
    # flows across leaves are as fast as others: there are more cables than Slurm's tree has links
    cabled, names = fast(two_levels([4, 4], spines=8)), fast(two_levels([4, 4], spines=1), 1.0)
    flows = measured(cabled)
    assert len({flow.bandwidth for flow in flows}) == 1
    assert compare(flows, names) == ()
    flows = measured(cabled, of_host=lambda host: 0.4 if host == "h05" else 1.0)
    assert named(compare(flows, names)) == [("host", "h05")]


def test_a_slow_host():
    flows = measured(FABRIC, of_host=lambda host: 0.4 if host == "h05" else 1.0)
    faults = compare(flows, FABRIC)
    assert named(faults) == [("host", "h05")] and {fault.direction for fault in faults} == {"sends", "receives"}
    assert [fault.reached for fault in faults] == [pytest.approx(0.4)] * 2
    assert sum(fault.flows for fault in faults) == sum("h05" in (flow.source.host, flow.target.host) for flow in flows)


def test_a_slow_adapter_is_not_its_host():
    rails = fast(two_levels([4, 4], spines=2, rails=2))
    flows = measured(rails, rails=2, of_adapter=lambda adapter: 0.5 if adapter == "h03 m1" else 1.0)
    assert named(compare(flows, rails)) == [("adapter", "h03 m1")]


def test_a_slow_link_between_switches():
    flows = measured(FABRIC, of_link=lambda source, target: 0.3 if (source, target) == ("leaf1", "spine0") else 1.0)
    faults = compare(flows, FABRIC)
    assert [fault.kind for fault in faults] == ["link"]
    assert faults[0].name.startswith("leaf1 -> ")
    assert " spine0 " in faults[0].name


def test_the_wrong_network():
    flows = [replace(flow, bandwidth=1e9) for flow in measured(fast(two_levels([4], spines=1)))]
    (fault,) = compare(flows, fast(two_levels([4], spines=1)))
    assert fault.kind == "fabric"
    assert " 2% " in str(fault)
    unknown = fast(two_levels([4], spines=1), 1.0)
    assert compare(flows, unknown) == ()


def test_a_link_that_only_one_host_uses_may_be_it_too():
    lonely = fast(two_levels([3, 1], spines=1))
    flows = measured(lonely, of_link=lambda source, target: 0.3 if (source, target) == ("spine0", "leaf1") else 1.0)
    (fault,) = compare(flows, lonely)
    assert (fault.kind, fault.name, fault.direction) == ("host", "h03", "receives")
    links = ("link leaf0 -> spine0 (port 4)", "link spine0 -> leaf1 (port 2)")
    assert fault.alternatives == links
    assert str(fault).endswith(", ".join(links))
    assert (fault.reached, fault.flows) == (pytest.approx(0.3), 3)


def test_the_one_that_explains_most_is_named():
    def flow(source: str, target: str, bandwidth: float) -> Flow:
        ends = (End(host=host, device="m0") for host in (source, target))
        return Flow(round=0, source=next(ends), target=next(ends), bandwidth=bandwidth)

    good = [flow(f"c{number}", f"d{number}", 1e9) for number in range(5)]
    (fault,) = compare([flow("z", "a", 1e8), flow("z", "b", 1e8), *good])
    assert (fault.kind, fault.name, fault.flows) == ("host", "z", 2)


def test_a_host_that_the_fabric_lacks():
    flows = [replace(flow, source=End(host="h099", device="m0")) for flow in measured(FABRIC)[:1]]
    with refused("HT-not-in-fabric", hosts=["h099"]):
        compare(flows, FABRIC)


def test_an_adapter_that_the_fabric_lacks():
    with refused("HT-not-in-fabric", adapter="h00 mlx5_7") as caught:
        adapter_of(two_levels([1], spines=1, rails=2), End(host="h00", device="mlx5_7"))
    assert caught.value.hint.split()[-3:] == ["m0,", "h00", "m1"]


@given(st.integers(2, 40), st.integers(1, 3))
def test_rounds(stations: int, rails: int):
    made = rounds(stations, rails)
    for pairs in made:
        ranks = Counter(rank for pair in pairs for rank in pair)
        assert max(ranks.values()) == 1
        assert all(one % rails == other % rails and one != other for one, other in pairs)
    flat = [pair for pairs in made for pair in pairs]
    assert len(set(flat)) == len(flat)
    neighbours = {(s * rails, (s + 1) % stations * rails) for s in range(stations)}
    assert neighbours | {(b, a) for a, b in neighbours} <= set(flat)
    # a few rounds for each power of two
    assert len(made) <= 6 * stations.bit_length()
