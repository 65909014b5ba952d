"""The local Slurm: it starts, takes a fabric, listens at the loopback alone, and leaves nothing."""

from __future__ import annotations

import psutil
import pytest

from hpctrain.control.hosts.arrange import known_fabric
from support.slurm.local_slurm import LocalSlurm


def test_the_topology_is_read_as_a_fabric(slurm: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    fabric, source = known_fabric(["n1", "n2", "n3", "n4"])
    assert source.split() == ["scontrol", "show", "topology"]
    assert not fabric.warnings
    n1, n2, n3, n4 = (set(fabric.leaves[fabric.hosts.index(host)]) for host in ("n1", "n2", "n3", "n4"))
    assert n1 == n3
    assert n2 == n4
    assert n1 != n2


def test_daemons_listen_at_the_loopback_alone(slurm: LocalSlurm) -> None:
    addresses = {
        connection.laddr.ip
        for daemon in slurm._daemons().values()
        for connection in daemon.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
