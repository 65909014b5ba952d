from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.predict.allreduce_time import Ranks, allreduce
from hpctrain.control.predict.compute import Device
from hpctrain.control.predict.measurements import Curve
from hpctrain.control.predict.network import stated_network
from support.report.network_times import ring_seconds, tree_seconds
from support.report.plain_values import plain

GBIT = 1e9 / 8
ENGINES = ("nccl", "horovod", "mpi", "gloo")


def ranks(hosts, local, *, device="a100-sxm-80", engine="nccl", gbit=200.0, adapters=8, **more):
    network = stated_network(hosts, adapters=adapters, bytes_per_s=gbit * GBIT)
    return Ranks(network=network, local=local, device=Device(name=device), engine=engine, **more)


def seconds(nbytes, who, values=None, curves=()):
    return float(allreduce(nbytes, who, values or plain(), curves)[0])


def test_within_a_node_it_follows_the_measured_bus_bandwidth():
    # 8 x A100: 174 GB/s at 134 MB.
    assert seconds(1.34e8, ranks(1, 8)) == pytest.approx(2 * 7 / 8 * 1.34e8 / 174e9)


def test_large_buffers_between_nodes_take_the_adapters_time():
    # One adapter of 100 Gbit/s a node, rings over 4 x 8 GPUs.
    who = ranks(4, 8, gbit=100, adapters=1, trees=False)
    wanted = 2 * 31 / 32 * 1e9 / (100 * GBIT * 0.94)
    assert seconds(1e9, who) == pytest.approx(wanted, rel=0.01)


def test_small_buffers_go_through_trees_where_nccl_has_them():
    who = ranks(512, 8)
    assert seconds(1e6, who) < 0.1 * seconds(1e6, replace(who, trees=False))
    # A shared link changes the rate, and not what NCCL's tuner chooses.
    for share in ("ring", "tree"):
        shared = replace(who.network, **{f"{share}_share": 0.01})
        slower = seconds(1e9, replace(who, network=shared)) > 10 * seconds(1e9, who)
        assert slower == (share == "tree")


@pytest.mark.parametrize("engine", ["mpi", "gloo"])
def test_a_measured_curve_is_followed_where_it_was_measured(engine):
    curve = Curve(engine=engine, ranks=2, hosts=1, points=((1e4, 3e-4), (1e8, 0.2)), source="a test")
    who = ranks(1, 2, device="cpu", engine=engine, adapters=1)
    for size, wanted in curve.points:
        assert seconds(size, who, curves=[curve]) == pytest.approx(wanted)
    # More ranks of the same host have more to move.
    assert seconds(1e8, replace(who, local=4), curves=[curve]) > 1.5 * 0.2


def test_a_curve_of_another_engine_is_not_taken():
    curve = Curve(engine="gloo", ranks=2, hosts=1, points=((1e6, 99.0),), source="a test")
    assert seconds(1e6, ranks(1, 2, device="cpu", engine="mpi", adapters=1), curves=[curve]) < 1


@given(
    engine=st.sampled_from(ENGINES),
    hosts=st.integers(1, 64),
    local=st.integers(1, 8),
    size=st.floats(1e3, 1e9),
    factor=st.floats(1.01, 8),
)
def test_more_bytes_never_take_less_time(engine, hosts, local, size, factor):
    device = "cpu" if engine in ("mpi", "gloo") else "h100-sxm"
    who = ranks(hosts, local, device=device, engine=engine)
    less, more = seconds(size, who), seconds(size * factor, who)
    assert np.isfinite(less)
    assert less >= 0
    # Where another algorithm is chosen for more bytes, its own time may be a little below the other's.
    assert more >= 0.5 * less


def test_load_on_the_links_counts_beside_a_curve_too():
    curve = Curve(engine="nccl", ranks=16, hosts=2, points=((1e6, 1e-3), (1e8, 0.02)), source="")
    free = ranks(64, 8, adapters=1, gbit=100)
    crowded = replace(
        free,
        network=replace(free.network, ring_share=0.25, tree_share=0.25),
    )
    assert seconds(1e8, crowded, curves=[curve]) > 2 * seconds(1e8, free, curves=[curve])


def test_a_curve_of_one_host_says_nothing_of_links():
    slow = Curve(engine="nccl", ranks=8, hosts=1, points=((1e6, 1e-3), (1e8, 0.02)), source="")
    who = ranks(4, 8, adapters=1, gbit=1)
    assert seconds(1e8, who, curves=[slow]) == pytest.approx(seconds(1e8, who))


def test_hpctrains_own_engine_sends_narrow_between_hosts_alone():
    one = ranks(1, 8, device="cpu", engine="mpi", adapters=1)
    assert seconds(1e8, replace(one, wire=0.5)) == seconds(1e8, one)
    many = ranks(4, 1, device="cpu", engine="mpi", adapters=1, gbit=1)
    assert seconds(1e8, replace(many, wire=0.5)) == pytest.approx(seconds(1e8, many) / 2, rel=0.05)


@pytest.mark.parametrize(("hosts", "ways"), [(2, 1), (4, 4)])
def test_two_hosts_send_each_other_everything_at_once(hosts, ways):
    who = ranks(hosts, 1, device="cpu", engine="mpi", adapters=1, gbit=1)
    assert seconds(1.0, who, plain(**{"mpi.step_s": 1e-3})) == pytest.approx(ways * 1e-3, rel=1e-3)


@pytest.mark.parametrize("trees", [False, True])
def test_between_nodes_it_is_the_networks_own_formula(trees):
    """That of :class:`Network`, which is held against SimGrid."""
    who = ranks(64, 8, gbit=100, adapters=8, trees=trees)
    who = replace(who, network=replace(who.network, ring_share=0.5))
    exact = plain(wire_efficiency=1.0, nccl_step_s=1e-5)
    if trees:
        wanted = tree_seconds(who.network, 1e9, latency_s=1e-5)
    else:
        wanted = ring_seconds(who.network, 1e9, ranks_per_host=8, latency_s=1e-5)
    assert seconds(1e9, who, exact) == pytest.approx(wanted)
