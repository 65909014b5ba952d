"""``hpctrain topology verify``, started by mpirun over ssh: the host on a slow link is named, and no other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from support.hosts.local_hosts import LocalHosts
from support.launching import Launch

# A slow link carries it in a twenty-fifth of a second.
_SIZE = ("--size-mb", "0.5")
_TENTH = "100mbit"


def measured(hpctrain: Launch, hosts: str, code: int) -> dict[str, Any]:
    result = hpctrain("topology", "verify", "-H", hosts, *_SIZE, "--json")
    assert result.returncode == code, result.stdout
    # Both streams are in one; warnings go before.
    found: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{\n") :])
    return found


def named(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    for fault in found["faults"]:
        assert fault["reached"] == pytest.approx(0.1, rel=0.3)
    return [(fault["kind"], fault["name"], fault["direction"]) for fault in found["faults"]]


@pytest.mark.long
def test_even_links_raise_no_alarm(hosts_hpctrain: Launch):
    found = measured(hosts_hpctrain, "h1,h2,h3,h4", 0)
    assert found["faults"] == []
    for flow in found["flows"]:
        assert 60e6 < flow["bandwidth"] < 125e6, flow


@pytest.mark.parametrize(
    ("direction", "words"),
    [
        pytest.param("both", "both", id="both"),
        pytest.param("to", "receives", id="to", marks=pytest.mark.long),
        pytest.param("from", "sends", id="from", marks=pytest.mark.long),
    ],
)
def test_one_slow_host_of_three(hosts: LocalHosts, hosts_hpctrain: Launch, direction: str, words: str):
    hosts.rate("h2", _TENTH, direction)
    found = measured(hosts_hpctrain, "h1,h2,h3", 3)
    assert named(found) == [("host", "h2", words)]
    speeds = [flow["bandwidth"] for flow in found["flows"]]
    assert min(speeds) == pytest.approx(12e6, rel=0.2) and 60e6 < max(speeds) < 125e6


@pytest.mark.long
def test_one_slow_host_of_four_in_words(hosts: LocalHosts, hosts_hpctrain: Launch):
    hosts.rate("h3", _TENTH)
    result = hosts_hpctrain("topology", "verify", "-H", "h1,h2,h3,h4", "--interface", "eth0", *_SIZE)
    assert result.returncode == 3, result.stdout
    # A link lets a burst of 128 kB through at once, a share of so small a message.
    [slow] = [line for line in result.stdout.splitlines() if line.startswith("slow: ")]
    assert re.fullmatch(r"slow: host h3: (9|1[0-2])% .*\(6 flows\)", slow), result.stdout


@pytest.mark.long
def test_two_of_four_that_are_slow_in_one_direction_each(hosts: LocalHosts, hosts_hpctrain: Launch):
    hosts.rate("h2", _TENTH, "to")
    hosts.rate("h4", _TENTH, "from")
    found = measured(hosts_hpctrain, "h1,h2,h3,h4", 3)
    assert sorted(named(found)) == [("host", "h2", "receives"), ("host", "h4", "sends")]


def test_of_two_hosts_nobody_can_say_which(hosts: LocalHosts, hosts_hpctrain: Launch):
    hosts.rate("h2", _TENTH, "to")
    found = measured(hosts_hpctrain, "h1,h2", 3)
    assert named(found) == [("flow", "h1 -> h2", "both")]
    assert found["faults"][0]["alternatives"] == ["host h1 sends", "host h2 receives"]
