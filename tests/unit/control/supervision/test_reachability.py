"""Whether a host is reached on a port that the system chose."""

from __future__ import annotations

import socket
import threading

import pytest

from hpctrain.common.cluster.interfaces import Interface
from hpctrain.control.supervision import reachability
from hpctrain.control.supervision.reachability import listening, own_addresses, reaches


def test_while_it_listens_and_no_longer() -> None:
    threads = threading.active_count()
    with listening("127.0.0.1") as port:
        # More than wait in line for whoever accepts.
        assert all(reaches("127.0.0.1", port) for _ in range(300))
        # At no other address.
        assert not reaches("127.0.0.2", port)
    assert not reaches("127.0.0.1", port)
    assert threading.active_count() == threads


def test_nobody_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_SECONDS", 0.3)
    # Only one may wait in line; the kernel answers no other, as a firewall that drops what comes.
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
    ):
        assert not reaches(*full.getsockname())


def test_the_addresses_at_which_another_host_may_reach_this_one() -> None:
    def interface(name: str, *addresses: str, up: bool = True, host_only: bool = False) -> Interface:
        return Interface(name=name, up=up, host_only=host_only, addresses=addresses)

    found = [
        interface("lo", "127.0.0.1", "::1", host_only=True),
        interface("docker0", "172.17.0.1", host_only=True),
        interface("eth0", "10.0.0.1", "fe80::1", "2001:db8::1"),
        interface("eth1", "10.0.1.1", up=False),
        interface("ib0", "10.1.0.1"),
    ]
    assert own_addresses(found) == ("10.0.0.1", "2001:db8::1", "10.1.0.1")
