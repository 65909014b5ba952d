"""Which networks the ranks of several hosts connect over, by the interfaces of each, and when a silent host is lost."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.interfaces import Interface
from hpctrain.common.settings import HOST_TIMEOUT
from hpctrain.control.hosts.networks import choose_networks, keepalive_options, require_interface
from support.refusals import refused

LOOPBACK = Interface(name="lo", up=True, host_only=True, addresses=("127.0.0.1", "::1"))


def interface(name: str, *addresses: str, up: bool = True, inner: bool = False) -> Interface:
    found = [ipaddress.ip_interface(address) for address in addresses]
    return Interface(
        name=name,
        up=up,
        host_only=inner,
        addresses=tuple(str(one.ip) for one in found),
        networks=tuple(str(one.network) for one in found if one.version == 4),
    )


def hosts(*interfaces: tuple[Interface, ...]) -> dict[str, tuple[Interface, ...]]:
    return {f"h{number}": (LOOPBACK, *found) for number, found in enumerate(interfaces, 1)}


def eth(number: int, name: str = "eth0") -> Interface:
    return interface(name, f"10.77.0.{number}/24", f"fe80::{number}/64")


DOCKER = interface("docker0", "172.17.0.1/16", inner=True)


@pytest.mark.parametrize(
    "interfaces",
    [
        [(eth(1),), (eth(2),)],
        # A second network, of all hosts or of some: Open MPI takes what both ends have.
        [(eth(1), interface("ib0", "10.88.0.1/24")), (eth(2), interface("ib0", "10.88.0.2/24"))],
        [(eth(1), interface("ib0", "10.88.0.1/24")), (eth(2),)],
        # Neither has a word on where it leads.
        [(eth(1), interface("docker0", inner=True)), (eth(2),)],
        [
            (eth(1), interface("eth1", "172.17.0.1/16", up=False)),
            (eth(2), interface("eth1", "172.17.0.1/16", up=False)),
        ],
        # What joins the hosts may well be a bridge.
        [(interface("br0", "10.77.0.1/24", inner=True),), (interface("br0", "10.77.0.2/24", inner=True),)],
        # One host by two names.
        [(eth(1), DOCKER), (eth(1), DOCKER)],
        [(eth(1), DOCKER)],
    ],
)
def test_open_mpi_is_left_to_itself(interfaces: list[tuple[Interface, ...]]) -> None:
    assert choose_networks(hosts(*interfaces)).variables == {}


@pytest.mark.parametrize(
    "wrong",
    [
        DOCKER,
        # By its address alone, whatever it is called.
        interface("tap7", "192.168.122.1/24"),
        interface("lo", "10.99.0.1/32"),
    ],
)
def test_an_address_that_all_have_is_no_way(wrong: Interface) -> None:
    found = choose_networks(hosts((eth(1), wrong), (eth(2), wrong), (eth(3),)))
    assert found.variables == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
    }
    assert found.note and " eth0: " in found.note and f" {wrong.name} " in found.note


def test_names_that_differ_are_told_by_their_network() -> None:
    """Gloo finds its interface on each host by itself."""
    found = choose_networks(hosts((eth(1), DOCKER), (eth(2, "eno1"), DOCKER)))
    assert found.variables == {"NCCL_SOCKET_IFNAME": "=eno1,eth0", "OMPI_MCA_btl_tcp_if_include": "10.77.0.0/24"}


def test_hosts_without_a_network_in_common_choose_for_themselves() -> None:
    apart = [(interface("eth0", f"10.77.{n}.1/24"), DOCKER) for n in (1, 2)]
    same = interface("eth0", "10.0.2.15/24")
    for found in (apart, [(same, interface("eth1", "fe80::1/64")), (same, interface("eth1", "fe80::2/64"))]):
        assert choose_networks(hosts(*found)).variables == {}


def test_a_chosen_interface_has_to_be_on_each_host() -> None:
    found = hosts((eth(1),), (eth(2, "eno1"), interface("eth0", "10.9.0.1/24", up=False)))
    require_interface("eth0,eno1", found)
    with refused("HT-interface-not-usable", interface="eth0", host="h2") as caught:
        require_interface("eth0", found)
    assert caught.value.hint.endswith(" eno1")


@given(st.integers(5, 3600))
def test_idle_time_and_probes_take_that_long_together(seconds):
    options = keepalive_options(HOST_TIMEOUT.read({"HPCTRAIN_HOST_TIMEOUT": str(seconds)}))
    assert options[::3] == ["--prtemca"] * 3
    assert options[1::3] == [f"oob_tcp_keepalive_{name}" for name in ("time", "intvl", "probes")]
    idle, interval, probes = map(int, options[2::3])
    assert min(idle, interval) >= 1
    assert idle + interval * probes == seconds
