"""The local Slurm: it starts, takes fabrics, listens at the loopback alone, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hpctrain.control.hosts.arrange import known_fabric
from support.launching import Launch
from support.slurm.local_slurm import LocalSlurm, Settings
from support.topology.listings import listing


def test_the_topology_is_read_as_a_fabric(slurm: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    fabric, source = known_fabric(["n1", "n2", "n3", "n4"])
    assert source.split() == ["scontrol", "show", "topology"]
    assert not fabric.warnings
    n1, n2, n3, n4 = (set(fabric.leaves[fabric.hosts.index(host)]) for host in ("n1", "n2", "n3", "n4"))
    assert n1 == n3
    assert n2 == n4
    assert n1 != n2


def test_slurm_gives_a_job_all_hosts_of_a_ragged_fabric(hpctrain: Launch, tmp_path: Path) -> None:
    """Leaves below spines, one on the core, one on that leaf, and a host on the core."""
    cables = [("leaf1", "spine1"), ("leaf2", "spine1"), ("leaf3", "spine2"), ("leaf4", "spine2")]
    cables += [("spine1", "core"), ("spine2", "core"), ("leaf5", "core"), ("leaf6", "leaf5"), ("n7 mlx5_0", "core")]
    cables += [(f"n{number} mlx5_0", f"leaf{number}") for number in range(1, 7)]
    (tmp_path / "fabric").write_text(listing(cables))
    converted = hpctrain("topology", "convert", str(tmp_path / "fabric"), "--to", "topology.conf").stdout
    names = tuple(f"n{number}" for number in range(1, 8))
    with LocalSlurm(Settings(nodes=names, topology=converted)) as other:
        tree = other.run("scontrol", "show", "topology")
        ran = other.run("srun", "--nodes=7", "sh", "-c", "echo $SLURM_TOPOLOGY_ADDR")
        assert "Nodes=n[1-7] Switches=" in tree
        assert "Nodes=n[1-2] Switches=leaf1,leaf2" in tree
        assert "core.spine1.leaf2.n2" in ran
        assert "core.joins-leaf5.leaf6.n6" in ran
        assert len(ran.split()) == 7
        assert "lack access to" not in (other.folder / "slurmctld.log").read_text()


def test_daemons_listen_at_the_loopback_alone(slurm: LocalSlurm) -> None:
    addresses = {
        connection.laddr.ip
        for daemon in slurm._daemons().values()
        for connection in daemon.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
