"""Whether a host is reached on a port that the system chose."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from hpctrain.cluster import way_back
from hpctrain.cluster.way_back import listening, own_address, reaches


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
    monkeypatch.setattr(way_back, "_SECONDS", 0.3)
    begin = time.monotonic()
    # Only one may wait in line; the kernel answers no other, as a firewall that drops what comes.
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
    ):
        assert not reaches(*full.getsockname())
    assert time.monotonic() - begin < 5


def test_the_address_that_another_host_sees() -> None:
    assert own_address(["127.0.0.2"]) == "127.0.0.1"
    # A name that is not known has no address.
    assert own_address([]) is None
