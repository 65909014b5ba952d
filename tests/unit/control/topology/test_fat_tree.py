"""Generated fat trees have the cables that their parameters ask for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.fat_tree import fat_tree
from hpctrain.control.topology.levels import oversubscription
from hpctrain.control.topology.readers import ibnetdiscover
from support.refusals import refused


@settings(max_examples=60, deadline=None)
@given(
    hosts=st.integers(1, 20),
    rails=st.integers(1, 3),
    leaf_down=st.integers(1, 6),
    leaf_up=st.integers(1, 3),
    levels=st.sampled_from([2, 3]),
    pod_leaves=st.integers(1, 4),
    spine_up=st.integers(1, 3),
)
def test_a_fat_tree_is_what_was_asked_for(
    hosts: int, rails: int, leaf_down: int, leaf_up: int, levels: int, pod_leaves: int, spine_up: int
) -> None:
    text = fat_tree(
        hosts=hosts,
        rails=rails,
        leaf_down=leaf_down,
        leaf_up=leaf_up,
        levels=levels,  # type: ignore[arg-type]
        pod_leaves=pod_leaves,
        spine_up=spine_up,
    )
    fabric = build_fabric(ibnetdiscover.read(text, "f"))
    leaves = -(-hosts // leaf_down) * rails
    pods = -(-leaves // pod_leaves) if levels == 3 else 1
    assert fabric.subnet.max() == 0, "all of one piece"
    assert fabric.hosts == tuple(f"node{number + 1:04d}" for number in range(hosts))
    spines = pods * leaf_up if leaves > 1 else 0
    cores = leaf_up * spine_up if levels == 3 and pods > 1 else 0
    assert np.bincount(fabric.level[fabric.level >= 0], minlength=4).tolist() == [hosts * rails, leaves, spines, cores]
    # Spines above a single leaf, and cores above a single pod, join nothing.
    assert bool(fabric.warnings) == (leaves == 1 or (levels == 3 and pods == 1))
    for host in range(hosts):
        assert len(fabric.leaves[host]) == rails
        assert fabric.leaves[host] == fabric.leaves[host // leaf_down * leaf_down]
    assert len(set(zip(fabric.source.tolist(), fabric.source_port.tolist(), strict=True))) == len(fabric.source)
    full = leaf_down / leaf_up
    ratios = oversubscription(fabric)
    if leaves > 1:
        assert max(ratios.values()) <= full
        assert hosts % leaf_down or set(ratios.values()) == {full}
    up = np.bincount(
        fabric.source[fabric.level[fabric.source] < fabric.level[fabric.target]], minlength=len(fabric.names)
    )
    assert set(up[fabric.level == 2]) <= {spine_up if cores else 0}


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        ({"hosts": 0, "leaf_down": 4, "leaf_up": 4}, "HT-network-bad-number", {"name": "hosts", "value": 0}),
        ({"hosts": 4, "leaf_down": 4, "leaf_up": 0}, "HT-network-bad-number", {"name": "leaf_up", "value": 0}),
        ({"hosts": 4000, "leaf_down": 8, "leaf_up": 8}, "HT-network-bad-number", {"ports": 500}),
        ({"hosts": 49152, "leaf_down": 200, "leaf_up": 20}, "HT-network-bad-number", {"adapters": 49152}),
    ],
)
def test_a_tree_that_infiniband_cannot_have(arguments: dict[str, int], code: str, values: dict[str, object]) -> None:
    with refused(code, **values):
        fat_tree(**arguments)  # type: ignore[arg-type]
