"""Max-min fair rates against their definition, and overlapping steps against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_allreduces import halving_doubling, ring
from sharing import max_min, overlapped_allreduce

from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.fat_tree import fat_tree
from hpctrain.control.topology.readers import ibnetdiscover
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.traffic import Phase, predict_allreduce


def test_the_rates_of_a_line_of_links() -> None:
    """One flow over all of three links, one on each: the long one gets half of the slowest, the others the rest."""
    flow, link = np.array([0, 0, 0, 1, 2, 3]), np.array([0, 1, 2, 0, 1, 2])
    rates = max_min(flow, link, np.array([10.0, 4.0, 6.0]), 5)
    assert rates.tolist() == pytest.approx([2.0, 8.0, 2.0, 4.0, np.inf])


@given(st.data())
def test_rates_are_max_min_fair_by_their_definition(data: st.DataObject) -> None:
    """No link carries more than it can, and each flow has a full link on which no other flow is faster."""
    links = data.draw(st.integers(1, 6))
    flows = data.draw(st.lists(st.sets(st.integers(0, links - 1), min_size=1), min_size=1, max_size=12))
    capacity = np.array(data.draw(st.lists(st.floats(0.1, 100), min_size=links, max_size=links)))
    flow = np.array([number for number, path in enumerate(flows) for _ in path])
    link = np.array([each for path in flows for each in path])
    rates = max_min(flow, link, capacity, len(flows))
    carried = np.bincount(link, rates[flow], minlength=links)
    assert (carried <= capacity * (1 + 1e-6)).all()
    fastest = [
        max((rates[number] for number, path in enumerate(flows) if each in path), default=0) for each in range(links)
    ]
    for rate, path in zip(rates, flows, strict=True):
        assert any(carried[each] >= capacity[each] * (1 - 1e-6) and rate >= fastest[each] * (1 - 1e-6) for each in path)


@pytest.fixture(scope="module")
def tapered() -> Fabric:
    return build_fabric(ibnetdiscover.read(fat_tree(hosts=16, leaf_down=4, leaf_up=1), "generated"))


@given(seed=st.integers(0, 30), hosts=st.integers(2, 16))
def test_a_ring_takes_as_long_as_its_most_loaded_link(tapered: Fabric, seed: int, hosts: int) -> None:
    """No message takes longer than at that link's full load, and the link is never idle: nothing is gained or lost."""
    order = np.random.default_rng(seed).permutation(np.flatnonzero(tapered.level == 0))[:hosts].astype(np.int32)
    routes = Routes(tapered)
    assert overlapped_allreduce(routes, ring(order), 1e9) == pytest.approx(predict_allreduce(routes, ring(order), 1e9))


def test_ranks_go_on_when_their_own_messages_are_done(tapered: Fabric) -> None:
    """Two messages of 1 s and of 1/4 s, then one from each sender: in turn 1 + 1 s, beside each other 1 + 1/4 s."""
    one, two, three, four = np.flatnonzero(tapered.level == 0)[:4].astype(np.int32)
    rate = float(tapered.bandwidth[0])
    steps = [
        Phase(source=np.array([one]), target=np.array([two]), share=1.0),
        Phase(source=np.array([three]), target=np.array([four]), share=0.25),
        Phase(source=np.array([one]), target=np.array([two]), share=0.25),
        Phase(source=np.array([three]), target=np.array([four]), share=1.0),
    ]
    assert overlapped_allreduce(Routes(tapered), steps, rate) == pytest.approx(1.25)
    assert predict_allreduce(Routes(tapered), steps, rate) == pytest.approx(2.5)


def test_halving_and_doubling_without_contention(tapered: Fabric) -> None:
    """2 (n - 1) / n of the buffer (Rabenseifner, 2004), on one leaf."""
    order = np.flatnonzero(tapered.level == 0)[:4].astype(np.int32)
    rate = float(tapered.bandwidth[0])
    assert overlapped_allreduce(Routes(tapered), halving_doubling(order), rate) == pytest.approx(1.5)


def test_one_rank_sends_nothing(tapered: Fabric) -> None:
    alone = np.flatnonzero(tapered.level == 0)[:1].astype(np.int32)
    assert overlapped_allreduce(Routes(tapered), ring(alone), 1e9) == 0
    assert overlapped_allreduce(Routes(tapered), halving_doubling(alone), 1e9) == 0
