"""The address at which ranks of other hosts reach this one, and the interface that Gloo listens at."""

from __future__ import annotations

import os
import socket

import pytest

pytest.importorskip("torch")

from hpctrain.comm import addresses, rendezvous
from hpctrain.errors import HpctrainError


@pytest.fixture(autouse=True)
def no_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_one_host_talks_over_the_loopback() -> None:
    assert addresses.own_address("n1", ["n1", "n1"]) == "127.0.0.1"


def test_other_hosts_are_reached_from_the_address_on_the_way_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, *arguments: object, **options: object) -> list[object]:
        assert host == "n2"
        # Linux answers for all of 127.0.0.0/8, from the address that was called.
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.2", 9))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert addresses.own_address("n1", ["n1", "n2", "n3"]).startswith("127.")


def test_hosts_that_do_not_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*arguments: object, **options: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(HpctrainError, match=r"n1 has no route to n2: Name(.|\n)*GLOO_SOCKET_IFNAME=NAME"):
        addresses.own_address("n1", ["n1", "n2"])


def test_a_named_interface_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib7")
    assert addresses.own_address("n1", ["n1", "n2"]) == "127.0.0.1"
    with rendezvous.listening_at("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo,ib7"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo,ib7"


@pytest.mark.parametrize(("address", "interface"), [("127.0.0.1", "lo"), (None, None), ("192.0.2.1", None)])
def test_gloo_is_told_the_interface_for_its_groups_alone(address: str | None, interface: str | None) -> None:
    with rendezvous.listening_at(address):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    assert "GLOO_SOCKET_IFNAME" not in os.environ
