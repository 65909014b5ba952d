"""What a fabric tells of its hosts, and what hangs together in it, against networkx."""

from __future__ import annotations

import random
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from hpctrain.control.topology.fabric import components
from hpctrain.control.topology.summary import host_numbers, leaf_oversubscription
from support.refusals import refused
from support.topology.small_fabric import small_fabric, two_levels


def test_the_leaves_of_each_host() -> None:
    assert two_levels([2, 1], spines=1, rails=3).leaves == ({9}, {9}, {10}), "after nine adapters"
    fabric = small_fabric([("a 0", "leaf0"), ("a 1", "leaf1"), ("b 0", "leaf1")])
    leaf = fabric.names.index
    assert replace(fabric, hosts=("a", "b", "c")).leaves == ({leaf("leaf0"), leaf("leaf1")}, {leaf("leaf1")}, set())


@pytest.mark.parametrize(("wanted", "meant"), [("GPU2", "gpu2"), ("gpu22", "gpu2")])
def test_a_host_that_is_not_there(wanted: str, meant: str) -> None:
    fabric = replace(two_levels([5], spines=1), hosts=("gpu1", "gpu2", "gpu3", "Login", "n[1"))
    with refused("HT-not-in-fabric", hosts=[wanted]) as caught:
        host_numbers(fabric, ["gpu1", wanted])
    assert repr(meant) in caught.value.hint
    assert caught.value.hint.endswith("5 hosts: Login, gpu[1-3], n[1")


def test_the_list_of_known_hosts_has_an_end() -> None:
    names = tuple(f"{'abcdefgh'[number % 8]}{'x' * (number // 8)}" for number in range(400))
    fabric = replace(two_levels([400], spines=1), hosts=names)
    with refused("HT-not-in-fabric") as caught:
        host_numbers(fabric, ["node"])
    assert len(caught.value.hint) < 600 and caught.value.hint.endswith("…")


def test_oversubscription_by_the_names_of_leaves() -> None:
    fabric = two_levels([4, 2], spines=2)
    assert leaf_oversubscription(fabric) == {"leaf0": 2.0, "leaf1": 1.0}
    assert leaf_oversubscription(replace(fabric, bandwidth=np.ones_like(fabric.bandwidth))) == {}
    assert leaf_oversubscription(small_fabric([("a 0", "leaf0")])) == {"leaf0": None}


def test_what_hangs_together_in_random_graphs() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        nodes = chance.randint(1, 30)
        graph = nx.gnm_random_graph(nodes, chance.randint(0, 2 * nodes), seed=seed)
        source, target = (np.array([edge[end] for edge in graph.edges], np.int32) for end in (0, 1))
        label = components(nodes, source, target)
        assert {frozenset(np.flatnonzero(label == part).tolist()) for part in set(label.tolist())} == {
            frozenset(part) for part in nx.connected_components(graph)
        }
