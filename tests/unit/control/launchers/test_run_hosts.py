"""Where the hosts of a run and its fabric are known from; small scripts stand in for Slurm's programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fat_tree import fat_tree

from hpctrain.common.run.plan import HostOptions
from hpctrain.control.hosts import arrange as arranging
from hpctrain.control.hosts.arrange import FLAT, are_given, arrange, find_fabric
from support.golden import check_text
from support.refusals import refused

HOSTS = ("n1", "n2", "n3", "n4")
LEAVES = {"a": ("n1", "n3"), "b": ("n2", "n4")}
TREE = "SwitchName=top Switches=a,b\nSwitchName=a Nodes=n[1,3]\nSwitchName=b Nodes=n[2,4]\n"
LISTED = "scontrol show topology"
SCONTROL = f"cat <<'END'\n{TREE}END"
TABLE = """\
Unicast lids [0x0-0x3] of switch Lid 1 guid 0x0000000000000001 (leaf1):
  Lid  Out   Destination
       Port     Info
0x0002 001 : (Channel Adapter portguid 0x00000000000000a1: 'n1 mlx5_0')
1 valid lids dumped
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that comes first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def install(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def known(given: Path | None = None) -> tuple[str, int]:
    """Where the fabric is known from, and its number of leaves."""
    fabric, known_from = find_fabric(HostOptions(fabric=given), HOSTS)
    return known_from, len({fabric.leaves[host] for host in range(len(fabric.hosts))})


def test_first_a_file_then_scontrol_then_flat(programs: Path, tmp_path: Path) -> None:
    assert known() == (FLAT, 1)
    install(programs, "scontrol", "exit 1")
    assert known() == (FLAT, 1)
    install(programs, "scontrol", "echo No topology information available")
    assert known() == (FLAT, 1)
    install(programs, "scontrol", SCONTROL)
    assert known() == (LISTED, 2)
    path = tmp_path / "topology.conf"
    path.write_text("".join(f"SwitchName=s{host} Nodes={host}\n" for host in HOSTS))
    assert known(path) == (str(path), 4)


@pytest.mark.parametrize(
    "said",
    ["SwitchName=top Switches=a,b", "BlockName=b1 Nodes=n[1-", "RingName=r0 Nodes=n[1-4]", "SwitchName=s1 Colour=red"],
)
def test_what_slurm_prints_and_nobody_can_read_is_passed_over(programs: Path, said: str) -> None:
    install(programs, "scontrol", f"echo '{said}'")
    fabric, known_from = find_fabric(HostOptions(), HOSTS)
    assert (known_from, fabric.hosts) == (FLAT, tuple(HOSTS))
    assert fabric.warnings[0].startswith(LISTED) and f" {LISTED}:1: " in fabric.warnings[0]


def names(options: HostOptions, **environment: str) -> list[str]:
    hosts, _ = arrange(options, "here", None, environment, whole_fabric=True)
    return [host.host for host in hosts.slots]


def test_which_hosts(programs: Path, tmp_path: Path) -> None:
    install(programs, "scontrol", SCONTROL)
    fabric = tmp_path / "topology.conf"
    fabric.write_text(TREE)
    assert names(HostOptions()) == ["here"]
    assert sorted(names(HostOptions(), SLURM_JOB_NODELIST="n[1-4]")) == list(HOSTS)
    assert names(HostOptions(), SLURM_JOB_NODELIST="here") == names(HostOptions(), SLURM_JOB_NODELIST="") == ["here"]
    assert sorted(names(HostOptions(hosts="n[1,3]"), SLURM_JOB_NODELIST="n[1-4]")) == ["n1", "n3"]
    assert sorted(names(HostOptions(nodes=3), SLURM_JOB_NODELIST="n[1-4]")) == ["n1", "n2", "n3"]
    assert sorted(names(HostOptions(fabric=fabric), SLURM_JOB_NODELIST="n[2-3]")) == ["n2", "n3"]
    assert sorted(names(HostOptions(fabric=fabric))) == list(HOSTS)
    placed = names(HostOptions(hosts="n4,n1,n2,n3"))
    assert {tuple(sorted(placed[:2])), tuple(sorted(placed[2:]))} == set(LEAVES.values())
    with refused("HT-hosts-too-few", nodes=5, where="--hosts", count=4):
        names(HostOptions(hosts="n[1-4]", nodes=5))
    with refused("HT-hosts-too-few", nodes=2, where="this machine", count=1):
        names(HostOptions(nodes=2))


def test_a_run_does_not_take_a_whole_fabric(tmp_path: Path) -> None:
    fabric = tmp_path / "topology.conf"
    fabric.write_text(TREE)
    with refused("HT-hosts-not-named", hosts=4):
        arrange(HostOptions(fabric=fabric), "n1", None, {})
    hosts, _ = arrange(HostOptions(fabric=fabric), "n1", None, {"SLURM_JOB_NODELIST": "n2"})
    assert [host.host for host in hosts.slots] == ["n2"]


def test_hosts_without_a_name_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = fat_tree(hosts=4, leaf_down=2, leaf_up=2)
    fabric = tmp_path / "fabric.txt"
    fabric.write_text(text.replace("node0002 mlx5_0", "MT4129 ConnectX7"))
    read: list[object] = []
    given_fabric = arranging.given_fabric
    monkeypatch.setattr(arranging, "given_fabric", lambda *files: read.append(files) or given_fabric(*files))
    hosts, warnings = arrange(HostOptions(fabric=fabric), "here", None, {}, whole_fabric=True)
    assert [host.host for host in hosts.slots] == ["node0001", "node0003", "node0004"]
    check_text("hosts-without-name", "\n".join(warnings).replace(str(fabric), "FILE"))
    assert len(read) == 1
    for number in (1, 3, 4):
        text = text.replace(f"node000{number} mlx5_0", "MT4129 ConnectX7")
    fabric.write_text(text.replace("node0002 mlx5_0", "MT4129 ConnectX7"))
    with refused("HT-hosts-not-named", count=4):
        arrange(HostOptions(fabric=fabric), "here", None, {}, whole_fabric=True)


def test_a_source_that_lacks_a_host_is_passed_over(programs: Path) -> None:
    install(programs, "scontrol", SCONTROL)
    hosts, warnings = arrange(HostOptions(hosts="n3,login,n1"), "here", None, {})
    assert [host.host for host in hosts.slots] == ["n3", "login", "n1"]
    check_text("hosts-not-in-slurm-topology", "\n".join(warnings))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        # An empty option is given.
        (HostOptions(hosts=""), "HT-hosts-not-a-list"),
        (HostOptions(node=""), "HT-file-unreadable"),
        (HostOptions(routes=Path("nope")), "HT-option-needs-another"),
        (HostOptions(hosts="n1", hostfile=Path("hosts")), "HT-options-exclude-each-other"),
    ],
)
def test_options_that_are_refused(options: HostOptions, code: str) -> None:
    with refused(code):
        arrange(options, "here", None, {})


def test_a_flat_fabric_keeps_the_order_and_says_so(programs: Path) -> None:
    hosts, warnings = arrange(HostOptions(hosts="n3,n1,n2"), "here", None, {})
    assert [host.host for host in hosts.slots] == ["n3", "n1", "n2"]
    check_text("hosts-without-fabric", "\n".join(warnings))
    assert arrange(HostOptions(), "here", 2, {})[1] == ()


JOB = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"}


@pytest.mark.parametrize(
    ("ranks", "environment", "slots"),
    [
        (None, JOB, [2, 2, 2, 1]),
        (7, JOB, [2, 2, 2, 1]),
        (8, JOB, [2, 2, 2, 2]),
        # Without tasks asked for, Slurm counts processors; in a step, the step's tasks.
        (None, {**JOB, "SLURM_NTASKS": ""} | {"SLURM_STEP_ID": "0"}, [1, 1, 1, 1]),
        (None, {name: JOB[name] for name in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")}, [1, 1, 1, 1]),
        (None, {**JOB, "SLURM_TASKS_PER_NODE": "2"}, [1, 1, 1, 1]),
    ],
)
def test_the_tasks_of_a_job(programs: Path, ranks: int | None, environment: dict[str, str], slots: list[int]) -> None:
    hosts, _ = arrange(HostOptions(), "here", ranks, environment)
    assert [host.slots for host in hosts.slots] == slots


@pytest.mark.parametrize(
    ("variable", "text", "slots"),
    [
        ("PBS_NODEFILE", "n2.site\nn2.site\nn1.site\nn1.site\n", {"n2.site": 2, "n1.site": 2}),
        ("PBS_NODEFILE", "n2\nn1\n", {"n2": 1, "n1": 1}),
        ("LSB_DJOB_HOSTFILE", "n3\nn3\nn3\nn4\n", {"n3": 3, "n4": 1}),
        ("PE_HOSTFILE", "n1 4 all.q@n1 UNDEFINED\nn2 2 all.q@n2 0,1:0,2\n", {"n1": 4, "n2": 2}),
    ],
)
def test_the_hosts_of_a_job_of_another_scheduler(
    tmp_path: Path, variable: str, text: str, slots: dict[str, int]
) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    hosts, _ = arrange(HostOptions(), "here", None, {variable: str(path)})
    assert {host.host: host.slots for host in hosts.slots} == slots
    assert are_given(HostOptions(), {variable: str(path)})
    hosts, _ = arrange(HostOptions(hosts="n9:3"), "here", None, {variable: str(path)})
    assert {host.host: host.slots for host in hosts.slots} == {"n9": 3}
    path.write_text("")
    with refused("HT-hostfile-not-valid"):
        arrange(HostOptions(), "here", None, {variable: str(path)})


def test_what_the_user_says_goes_before_the_job(programs: Path, tmp_path: Path) -> None:
    hosts, _ = arrange(HostOptions(hosts="n1:3,n2"), "here", None, JOB)
    assert [(host.host, host.slots) for host in hosts.slots] == [("n1", 3), ("n2", 1)]
    path = tmp_path / "hosts"
    path.write_text("n3\nn3\nn2\n")
    hosts, _ = arrange(HostOptions(hostfile=path), "here", None, JOB)
    assert [(host.host, host.slots) for host in hosts.slots] == [("n3", 2), ("n2", 1)]
