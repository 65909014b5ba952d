"""The address at which ranks of other hosts reach this one, and the interface that Gloo listens at."""

from __future__ import annotations

import socket
from collections.abc import Callable

import psutil
import pytest

pytest.importorskip("torch")

from hpctrain.worker.comm import addresses


@pytest.fixture(autouse=True)
def no_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_other_hosts_are_reached_from_the_address_on_the_way_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, *arguments: object, **options: object) -> list[object]:
        assert host == "n2"
        # Linux answers for all of 127.0.0.0/8, from the address that was called.
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.2", 9))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert addresses.own_address("n1", ["n1", "n2", "n3"]).startswith("127.")


def _resolve_to(address: str) -> Callable[..., list[object]]:
    def resolve(name: str, port: int, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    return resolve


def test_a_store_for_several_hosts_listens_at_the_address_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = next(
        (
            each.address
            for all_of in psutil.net_if_addrs().values()
            for each in all_of
            if each.family == socket.AF_INET and not each.address.startswith("127.")
        ),
        None,
    )
    if reached is None:
        pytest.skip("this machine has the loopback interface alone")
    monkeypatch.setattr(socket, "getaddrinfo", _resolve_to(reached))
    found = addresses.listener_at("n1", 0, hosts=2)
    assert found
    with found:
        assert found.getsockname()[0] == reached
