import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_allreduces import ring

from hpctrain.control.topology.routes import (
    Phase,
    Routes,
    double_tree,
    parents,
    predict_allreduce,
    rail_rings,
    second_parents,
)
from support.topology.small_fabric import small_fabric, two_levels


def sent(steps: list[Phase], adapters: int) -> np.ndarray:
    """What each adapter sends in all, in buffers."""
    return sum(step.repeats * step.share * np.bincount(step.source, minlength=adapters) for step in steps)


def test_a_ring_on_one_leaf_takes_two_steps_a_rank() -> None:
    fabric = two_levels([5], spines=1)  # 2 bytes a second
    seconds = predict_allreduce(Routes(fabric), ring(np.arange(5, dtype=np.int32)), size=100)
    assert seconds == pytest.approx(2 * 4 * 100 / 5 / 2)


def test_rails_share_the_buffer_and_one_uplink_carries_them_all() -> None:
    fabric = two_levels([1, 1], spines=1, rails=3)
    adapters = np.array([fabric.adapters(0), fabric.adapters(1)])
    assert predict_allreduce(Routes(fabric), rail_rings(adapters), size=120) == pytest.approx(2 * (3 * 20 / 2))


def test_the_slowest_link_decides_not_the_busiest() -> None:
    fabric = small_fabric([("a m", "leaf0"), ("b m", "leaf0", 0.5), ("c m", "leaf0")])
    assert predict_allreduce(Routes(fabric), ring(np.arange(3, dtype=np.int32)), size=30) == pytest.approx(4 * 10 / 0.5)


@given(hosts=st.integers(2, 70))
def test_two_trees_reach_all_hosts_and_burden_each_in_one_only(hosts: int) -> None:
    trees = [parents(hosts), second_parents(hosts)]
    for parent in trees:
        assert (parent < 0).sum() == 1, "one root"
        assert np.bincount(parent[parent >= 0]).max() <= 2
        at = np.arange(hosts)
        for _ in range(hosts.bit_length()):
            at = np.where(parent[at] >= 0, parent[at], at)
        assert (parent[at] < 0).all(), "every host comes to the root, in few steps"
    inner = [np.isin(np.arange(hosts), parent) for parent in trees]
    assert (inner[0] & inner[1]).sum() <= hosts % 2
    (phase,) = double_tree(np.arange(hosts)[:, None])
    assert sorted(zip(phase.source, phase.target, strict=True)) == sorted(zip(phase.target, phase.source, strict=True))
    assert len(phase.source) == 4 * (hosts - 1)
    assert sent([phase], hosts).max() <= 2, "as in a large ring"


def test_the_two_trees_of_six_hosts_and_of_five() -> None:
    """By hand after NCCL's comments on its trees: ...0, 4, 2 and 4-5, 2-1, 2-3; mirrored, or shifted by one."""
    assert parents(6).tolist() == [-1, 2, 4, 2, 0, 4]
    assert second_parents(6).tolist() == [1, 5, 3, 1, 3, -1]
    assert parents(5).tolist() == [-1, 2, 4, 2, 0]
    assert second_parents(5).tolist() == [1, -1, 3, 0, 3]
