"""What flows between hosts get, against counts by hand, the closed forms of a ring, and `predict_allreduce`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fat_tree import fat_tree
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.predict.network import Network, network_of, networks, stated_network, usual_hosts
from hpctrain.control.topology.build import build_fabric, read_fabric
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.placement import rail_adapters
from hpctrain.control.topology.readers import ibnetdiscover
from hpctrain.control.topology.routes import Routes, double_tree, predict_allreduce, rail_rings
from support.refusals import refused
from support.report.network_times import ring_seconds, tree_seconds

NDR = 50e9


def generated(**shape: int) -> Fabric:
    return build_fabric(ibnetdiscover.read(fat_tree(**shape), "generated"))


@pytest.fixture(scope="module")
def one_uplink() -> Fabric:
    """Two leaves of four hosts, with one cable from each to one spine."""
    return generated(hosts=8, leaf_down=4, leaf_up=1)


def network(fabric: Fabric, order: list[int], **options: object) -> Network:
    return network_of(Routes(fabric), order, **options)


def test_a_ring_that_leaves_each_leaf_once_shares_nothing(one_uplink: Fabric) -> None:
    found = network(one_uplink, list(range(8)))
    assert (found.hosts, found.rails, found.rail_bytes_per_s) == (8, 1, NDR)
    assert found.ring_share == 1


def test_hosts_of_two_leaves_in_turn_share_the_one_cable_between_them(one_uplink: Fabric) -> None:
    assert network(one_uplink, [0, 4, 1, 5, 2, 6, 3, 7]).ring_share == 1 / 4


def test_two_trees_over_four_hosts_on_two_leaves_in_turn(one_uplink: Fabric) -> None:
    """The trees are 0-2, 2-1, 2-3 and 3-1, 1-2, 1-0. Four of the edges join the leaf of 0 and 2 to that of 1 and 3,
    each with one half each way; and hosts 1 and 2 send four halves themselves.
    """
    found = network(one_uplink, [0, 4, 1, 5])
    assert (found.tree_volume, found.tree_share) == (2.0, 1.0)


def test_the_time_of_rings_and_trees_is_that_of_the_most_loaded_link() -> None:
    fabric = generated(hosts=24, rails=2, leaf_down=8, leaf_up=2)
    order = np.random.default_rng(1).permutation(24).tolist()
    routes, size, latency = Routes(fabric), 1e9, 1e-4
    found = network_of(routes, order)
    assert found.ring_share < 1 and found.tree_share < 1
    adapters = rail_adapters(fabric, order)
    rings = predict_allreduce(routes, rail_rings(adapters), size)
    found_rings = ring_seconds(found, size, latency_s=latency)
    assert found_rings == pytest.approx(rings + 2 * 23 * latency, rel=1e-12)
    trees = predict_allreduce(routes, double_tree(adapters), size)
    found_trees = tree_seconds(found, size, latency_s=latency)
    assert found_trees == pytest.approx(trees + 2 * 5 * latency, rel=1e-12)


@given(hosts=st.integers(1, 600), adapters=st.integers(1, 9))
def test_a_stated_network_gives_the_bound_of_large_buffers(hosts: int, adapters: int) -> None:
    """Each host has to send 2 (n - 1) / n of the buffer (Patarasuk and Yuan, 2009); no time is under that."""
    found = stated_network(hosts, adapters=adapters, bytes_per_s=25e9)
    bound = 2 * (hosts - 1) / hosts * 1e9 / adapters / 25e9
    assert ring_seconds(found, 1e9) == pytest.approx(bound)
    assert bound * (1 - 1e-9) <= tree_seconds(found, 1e9) <= bound * hosts / max(1, hosts - 1) + 1e-12


def test_rails_on_two_subnets(tmp_path: Path) -> None:
    files = [tmp_path / "rail0", tmp_path / "rail1"]
    listing = fat_tree(hosts=8, leaf_down=4, leaf_up=1)
    files[0].write_text(listing)
    second = listing.replace("2c903", "2c904").replace("e09d73", "e09d74").replace("mlx5_0", "mlx5_1")
    files[1].write_text(second.replace("leaf", "edge").replace("spine", "top"))
    fabric = read_fabric(files)
    assert len(set(fabric.subnet.tolist())) == 2
    found = network(fabric, [0, 4, 1, 5, 2, 6, 3, 7])
    assert (found.rails, found.ring_share) == (2, 1 / 4)
    assert network(fabric, list(range(8)), adapters_per_host=1).rails == 1


def test_a_tree_without_cables_shares_nothing_and_says_so(tmp_path: Path) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=l1 Nodes=n[1-4]\nSwitchName=l2 Nodes=n[5-8]\nSwitchName=top Switches=l[1-2]\n")
    fabric = read_fabric(conf)
    with refused("HT-fabric-no-speeds") as wrong:
        networks(fabric, [2])
    assert "--link" in wrong.value.hint
    (found,) = networks(fabric, [8], bytes_per_s=25e9)
    assert found.ring_share == found.tree_share == 1.0
    assert found.rail_bytes_per_s == 25e9
    assert any("assumption" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"adapters_per_host": 2}, "HT-network-bad-number", {"adapters": 2}),
        ({"adapters_per_host": 0}, "HT-network-bad-number", {"adapters": 0}),
    ],
)
def test_wrong_options(one_uplink: Fabric, options: dict[str, object], code: str, values: dict[str, object]) -> None:
    with refused(code, **values) as wrong:
        network(one_uplink, [0, 1], **options)
    assert wrong.value.hint


def test_a_cable_slower_than_the_adapters_slows_the_ring(one_uplink: Fabric) -> None:
    assert network(one_uplink, [0, 1, 2], bytes_per_s=2 * NDR).ring_share == 1 / 2
    assert network(one_uplink, [0, 1, 2], bytes_per_s=NDR / 2).ring_share == 1.0, "cables faster than adapters"


def test_hosts_without_the_usual_adapters_and_servers_take_no_part() -> None:
    listing = fat_tree(hosts=4, rails=2, leaf_down=4, leaf_up=1).replace("node0004 mlx5_1", "lonely mlx5_0")
    fabric = build_fabric(ibnetdiscover.read(listing.replace("node0002", "oss2"), "generated"))
    assert [fabric.hosts[host] for host in usual_hosts(fabric)] == ["node0001", "node0003"]
    assert len(usual_hosts(fabric, 1)) == 4
    with refused("HT-hosts-too-few", nodes=3, hosts=2) as caught:
        networks(fabric, [3])
    assert caught.value.values["apart"].startswith("; 3 ")


GROWTH = """
import sys
from pathlib import Path
from hpctrain.control.predict.network import networks
from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.readers import ibnetdiscover
found = networks(build_fabric(ibnetdiscover.read(sys.stdin.read(), "generated")), [1 << bit for bit in range(10)])
assert [(each.hosts, each.rails) for each in found] == [(1 << bit, 8) for bit in range(10)]
assert found[-1].ring_share == 1.0, "depth-first, one adapter a leaf"
# Its own peak: ru_maxrss also counts the process that started it.
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.slow
def test_all_numbers_of_512_hosts_with_8_adapters_take_little_memory() -> None:
    """In a process of its own, whose peak of memory is its own; it takes 60 MiB."""
    listing = fat_tree(hosts=512, rails=8, leaf_down=32, leaf_up=16, levels=3)
    command = [sys.executable, "-c", GROWTH]
    done = subprocess.run(command, input=listing, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1 << 20
