"""``hpctrain topology verify``, started by mpirun over ssh: the host on a slow link is named, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.hosts.local_hosts import LocalHosts
from support.launching import Launch

# A slow link carries it in a twenty-fifth of a second.
_SIZE = ("--size-mb", "0.5")


def measured(hpctrain: Launch, hosts: str, code: int) -> dict[str, Any]:
    result = hpctrain("topology", "verify", "-H", hosts, *_SIZE, "--json")
    assert result.returncode == code, result.stdout
    # Both streams are in one; warnings go before.
    found: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{\n") :])
    return found


@pytest.mark.long
def test_even_links_raise_no_alarm(hosts_hpctrain: Launch):
    found = measured(hosts_hpctrain, "h1,h2,h3,h4", 0)
    assert found["faults"] == []
    for flow in found["flows"]:
        assert 60e6 < flow["bandwidth"] < 125e6, flow


def test_one_slow_host_of_three(hosts: LocalHosts, hosts_hpctrain: Launch):
    hosts.rate("h2", "100mbit", "to")
    found = measured(hosts_hpctrain, "h1,h2,h3", 3)
    (fault,) = found["faults"]
    assert (fault["kind"], fault["name"], fault["direction"]) == ("host", "h2", "receives")
    assert fault["reached"] == pytest.approx(0.1, rel=0.3)
    speeds = [flow["bandwidth"] for flow in found["flows"]]
    assert min(speeds) == pytest.approx(12e6, rel=0.2) and 60e6 < max(speeds) < 125e6
