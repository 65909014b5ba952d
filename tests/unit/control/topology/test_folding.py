"""Folding: what is one box, and that nothing is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.topology.folding import Folded, fold
from support.topology.small_fabric import small_fabric, two_levels


def names(folded: Folded, level: int) -> list[tuple[str, ...]]:
    return [folded.boxes[number].names for number in folded.row(level)]


def test_a_small_fabric_has_a_box_for_each_host_and_switch():
    folded = fold(two_levels([2, 3], spines=2), range(5))
    assert names(folded, 0) == [("h00",), ("h01",), ("h02",), ("h03",), ("h04",)]
    assert names(folded, 1) == [("leaf0",), ("leaf1",)]
    assert names(folded, 2) == [("spine0",), ("spine1",)]
    assert folded.box_of_host == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}


def test_many_hosts_are_folded_by_their_leaves():
    folded = fold(two_levels([2, 3], spines=1, rails=2), range(5), most=4)
    assert names(folded, 0) == [("h00", "h01"), ("h02", "h03", "h04")]
    lower, upper = folded.row(0)[1], folded.row(1)[1]
    (cables,) = [bundle.cables for bundle in folded.bundles if (bundle.lower, bundle.upper) == (lower, upper)]
    assert cables == 6


def test_rails_on_different_leaves_are_one_box():
    cables = [(f"h{host} m{rail}", f"leaf{rail + 2 * (host // 3)}") for host in range(6) for rail in range(2)]
    folded = fold(small_fabric(cables), range(6), most=5)
    assert names(folded, 0) == [("h0", "h1", "h2"), ("h3", "h4", "h5")]
    assert names(folded, 1) == [("leaf0",), ("leaf1",), ("leaf2",), ("leaf3",)]


def test_pods_are_folded_where_even_leaves_are_too_many():
    # 3 pods of 2 leaves and 2 spines, 2 cores: spines by what is below, leaves by what is above
    cables = []
    for pod in range(3):
        for leaf in (2 * pod, 2 * pod + 1):
            cables += [(f"h{2 * leaf + host:02d} m0", f"leaf{leaf}") for host in range(2)]
            cables += [(f"leaf{leaf}", f"spine{2 * pod + place}") for place in range(2)]
        cables += [(f"spine{2 * pod + place}", f"core{place}") for place in range(2)]
    folded = fold(small_fabric(cables), range(12), most=4)
    assert names(folded, 0) == [tuple(f"h{4 * pod + host:02d}" for host in range(4)) for pod in range(3)]
    assert names(folded, 1) == [("leaf0", "leaf1"), ("leaf2", "leaf3"), ("leaf4", "leaf5")]
    assert names(folded, 2) == [("spine0", "spine1"), ("spine2", "spine3"), ("spine4", "spine5")]
    assert names(folded, 3) == [("core0",), ("core1",)]


def test_leaves_of_the_same_hosts_are_folded_before_pods():
    # 2 groups of 2 hosts with 3 rails each; every leaf has the same spine
    cables = [(f"h{host} m{rail}", f"leaf{rail + 3 * (host // 2)}") for host in range(4) for rail in range(3)]
    cables += [(f"leaf{leaf}", "spine0") for leaf in range(6)]
    folded = fold(small_fabric(cables), range(4), most=3)
    assert names(folded, 1) == [("leaf0", "leaf1", "leaf2"), ("leaf3", "leaf4", "leaf5")]
    assert names(folded, 0) == [("h0", "h1"), ("h2", "h3")]


def test_leaves_are_never_all_in_one_box():
    folded = fold(two_levels([2, 2, 2], spines=1), range(6), most=2)
    assert len(folded.row(1)) == len(folded.row(0)) == 3


def test_hosts_keep_the_order_given_where_no_cables_cross_for_it():
    fabric = two_levels([3, 3], spines=1)
    assert names(fold(fabric, [5, 3, 4, 1, 2, 0]), 0) == [("h05",), ("h03",), ("h04",), ("h01",), ("h02",), ("h00",)]
    assert names(fold(fabric, [5, 3, 4, 1, 2, 0]), 1) == [("leaf1",), ("leaf0",)]
    interleaved = names(fold(fabric, [0, 3, 1, 4, 2, 5]), 0)
    assert sorted(interleaved[:3]) == [("h00",), ("h01",), ("h02",)]


def test_only_what_the_hosts_use_is_shown():
    folded = fold(two_levels([2, 2, 2], spines=2), [0, 3])
    assert names(folded, 0) == [("h00",), ("h03",)]
    assert names(folded, 1) == [("leaf0",), ("leaf1",)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 6))
def test_every_host_and_cable_is_in_one_place(sizes: list[int], spines: int, most: int):
    fabric = two_levels(sizes, spines=spines)
    folded = fold(fabric, range(sum(sizes)), most=most)
    assert sorted(host for number in folded.row(0) for host in folded.boxes[number].members) == list(range(sum(sizes)))
    links = np.concatenate([bundle.links for bundle in folded.bundles])
    assert sorted(links.tolist()) == list(range(len(fabric.source)))
    assert len(folded.row(0)) <= max(most, len(sizes))
