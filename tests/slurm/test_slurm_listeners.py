"""The local Slurm is reached from this machine alone."""

from __future__ import annotations

import psutil

from support.slurm.local_slurm import LocalSlurm


def test_daemons_listen_at_the_loopback_alone(slurm: LocalSlurm) -> None:
    daemons = slurm._daemons().values()
    addresses = {
        connection.laddr.ip
        for daemon in daemons
        for connection in daemon.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
