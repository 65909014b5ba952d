"""Hosts in the order of the plan, and the place of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from fat_tree import fat_tree
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.cluster.node_map import NodeMap, NumaNode, Slot
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.planning.place_hosts import KnownFabric, PlacedHosts, place_hosts
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.readers import ibnetdiscover, slurm
from support.refusals import invalid, refused

# Names in turns on two leaves: every step of the ring by name crosses.
TREE = "SwitchName=core Switches=s[1-2]\nSwitchName=s1 Nodes=n[1,3,5]\nSwitchName=s2 Nodes=n[2,4,6]\n"
NAMES = ("n1", "n2", "n3", "n4", "n5", "n6")
FABRIC = build_fabric(slurm.read(TREE, "topology.conf"))
NODE = NodeMap(gpus=(), adapters=(), numa_nodes=(NumaNode(index=0, cores=(0, 1, 2, 3)),), gpu_adapter=())
MACHINE = Machine(host="login", cores=8, frameworks=frozenset({"torch"}), versions={})


def placed(ranks: int, node_map: NodeMap | None = None) -> PlacedHosts:
    return place_hosts(dict.fromkeys(NAMES), ranks, KnownFabric(FABRIC, "topology.conf"), node_map=node_map)


def test_hosts_of_a_leaf_are_neighbours() -> None:
    hosts = placed(12)
    names = [host.host for host in hosts.slots]
    assert {frozenset(names[:3]), frozenset(names[3:])} == {frozenset(NAMES[::2]), frozenset(NAMES[1::2])}
    assert [host.slots for host in hosts.slots] == [2] * 6
    assert hosts.order is not None
    assert (hosts.order.crossings_given, hosts.order.crossings, hosts.order.bound) == (6, 2, 2)
    assert hosts.order.fabric == "topology.conf"


def test_each_rank_has_its_slot() -> None:
    hosts = placed(12, NODE)
    plan = make_plan(TrainingRequest(work=load_recipe("digits")), MACHINE, hosts)
    assert (plan.ranks, plan.threads_per_rank, plan.backend) == (12, 2, "mpi")
    first, second = (Slot(gpu=None, adapter=None, cores=cores, numa=0) for cores in ((0, 1), (2, 3)))
    assert [host.places for host in plan.hosts] == [(first, second)] * 6
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(("rails", "expected"), [(1, {}), (2, {"NCCL_CROSS_NIC": "0"})])
def test_rings_stay_on_their_rail(rails: int, expected: dict[str, str]) -> None:
    fabric = build_fabric(ibnetdiscover.read(fat_tree(hosts=4, rails=rails, leaf_down=2, leaf_up=2), "generated"))
    assert place_hosts(dict.fromkeys(("node0001", "node0003")), 2, KnownFabric(fabric, "x")).environment == expected


@pytest.mark.parametrize(
    ("names", "ranks", "code"),
    [
        (NAMES, 4, "HT-ranks-not-divisible"),
        (NAMES, 0, "HT-ranks-too-few"),
        (("n1", "m2"), 2, "HT-not-in-fabric"),
    ],
)
def test_refused(names: tuple[str, ...], ranks: int, code: str) -> None:
    with refused(code):
        place_hosts(dict.fromkeys(names), ranks, KnownFabric(FABRIC, "x"))


@pytest.mark.parametrize("interface", ["ib0", "bond0.12", "eth0:1", "ib0,ib1", "a" * 15])
def test_interfaces(interface: str) -> None:
    hosts = place_hosts(dict.fromkeys(NAMES), 6, KnownFabric(FABRIC, "x"), interface=interface)
    assert hosts.environment["NCCL_SOCKET_IFNAME"] == f"={interface}"


def test_places_for_all_ranks_or_for_none() -> None:
    slot = Slot(gpu=None, adapter=None, cores=(0,))
    with invalid("HT-plan-not-valid"):
        Slots(host="n1", slots=2, places=(slot,))
    with invalid("HT-plan-not-valid"):
        Plan(
            ranks=2,
            script=Script(path=Path("train.py")),
            hosts=(Slots(host="n1", slots=1, places=(slot,)), Slots(host="n2", slots=1)),
            threads_per_rank=1,
        )


def filled(slots: dict[str, int], ranks: int) -> list[tuple[str, int]]:
    hosts = place_hosts(slots, ranks, KnownFabric(FABRIC, "x"))
    return [(host.host, host.slots) for host in hosts.slots]


def test_uneven_slots_follow_their_hosts() -> None:
    # Named in turns of the leaves; the order keeps each leaf's hosts together.
    slots = {"n1": 1, "n2": 2, "n3": 3, "n4": 4}
    hosts = filled(slots, 10)
    assert dict(hosts) == slots
    assert {name for name, _ in hosts[:2]} in ({"n1", "n3"}, {"n2", "n4"})


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1), st.data())
def test_fewer_ranks_fill_hosts_one_after_the_other(slots: dict[str, int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, sum(slots.values())))
    hosts = filled(slots, ranks)
    assert sum(count for _, count in hosts) == ranks
    assert all(count == slots[name] for name, count in hosts[:-1])
    assert 1 <= hosts[-1][1] <= slots[hosts[-1][0]]


def test_more_ranks_than_slots() -> None:
    with refused("HT-ranks-too-many", ranks=4, slots=3):
        filled({"n1": 1, "n2": 2}, 4)
