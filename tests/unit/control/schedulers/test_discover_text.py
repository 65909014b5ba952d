"""What Slurm prints, and the profile that comes of it."""

from __future__ import annotations

import stat
from datetime import date
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.profiles import load_profile
from hpctrain.control.schedulers.slurm.discover import (
    Answers,
    Discovered,
    discover,
    known_limits,
    profile_from,
    profile_yaml,
    read_config,
    read_mpi_plugins,
)
from hpctrain.control.schedulers.slurm.nodes import most_gpus, read_nodes
from support.golden import check_text
from support.refusals import refused
from support.schedulers.discover_texts import A100, CONFIG, GPU, MPI, partition

TODAY = date(2026, 11, 21)


def found(
    nodes: str = A100, partitions: str = GPU, config: str = CONFIG, mpi: str = MPI, asked: str | None = None
) -> Discovered:
    return profile_from(Answers(nodes=nodes, config=config, partitions=partitions, mpi=mpi), asked, TODAY)


def test_a_cluster_of_equal_nodes(tmp_path: Path) -> None:
    discovered = found()
    profile = discovered.profile
    assert (profile.name, profile.partition, profile.time, profile.max_nodes) == ("alpine", "gpu", "1-00:00:00", None)
    assert (profile.node.gpus, profile.node.gpu_type, profile.node.gpu_option) == (4, "a100", "gpus-per-node")
    # 128 hardware threads.
    assert (profile.node.cores, profile.node.threads_per_core) == (64, 2)
    assert (profile.node.memory, profile.node.exclusive) == (None, False)
    assert (profile.requeue, profile.launcher, profile.fabric, profile.tried) == (True, "auto", None, False)
    check_text("discovered", "\n".join(discovered.findings))
    assert not any("\n" in line for line in discovered.findings)
    path = tmp_path / "auto.yaml"
    path.write_text(profile_yaml(profile))
    assert {"sinfo", "scontrol", "22.05.8", "2026-11-21."} <= {*path.read_text().splitlines()[0].split()}
    assert load_profile(str(path)) == profile


def test_the_default_partition_or_the_one_asked_for() -> None:
    partitions = partition("cpu", Default="YES") + partition("gpu", DefaultTime="01:00:00", MaxNodes="16")
    nodes = "cpu|mixed|8|64|2|32|256000|(null)\n" + A100
    default = found(nodes, partitions)
    assert (default.profile.partition, default.profile.node.gpus, default.profile.node.gpu_type) == ("cpu", 0, None)
    assert any("--partition gpu" in line for line in default.findings)
    asked = found(nodes, partitions, asked="gpu")
    assert (asked.profile.partition, asked.profile.time, asked.profile.max_nodes) == ("gpu", "01:00:00", 16)
    assert not any(line.startswith("GPUs:") for line in asked.findings)
    assert found(nodes, partition("gpu")).profile.partition == "gpu"


def test_several_partitions() -> None:
    partitions = partition("cpu", Default="YES", MaxTime="01:00:00") + partition(
        "gpu", MaxNodes="16", MaxTime="UNLIMITED"
    )
    nodes = "cpu|mixed|8|64|2|32|256000|(null)\n" + A100
    asked = found(nodes, partitions, asked="gpu,cpu")
    assert (asked.profile.partition, asked.profile.node.gpus) == ("gpu,cpu", 4)
    assert [(each.partition, each.total, each.most, each.time, each.gpus) for each in asked.limits] == [
        ("gpu", 32, 16, None, 4),
        ("cpu", 32, None, "01:00:00", 0),
    ]
    with refused("HT-slurm-partition-not-usable", partition="cup"):
        found(nodes, partitions, asked="gpu,cup")


@pytest.mark.parametrize(
    ("plugin", "printed", "ordered"),
    [
        ("topology/flat", "BlockName=b1 BlockIndex=0 Nodes=g[001-018] BlockSize=18\n", True),
        ("topology/default", "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=g[001-032]\n", True),
        ("topology/flat", "No topology information available\n", False),
        ("topology/flat", "", False),
        ("topology/block", "", True),
    ],
)
def test_a_topology_yaml_decides_in_place_of_the_plugin(plugin: str, printed: str, ordered: bool) -> None:
    config = CONFIG.replace("topology/tree", plugin)
    answers = Answers(nodes=A100, config=config, partitions=GPU, mpi=MPI, topology=printed)
    (said,) = (line for line in profile_from(answers, None, TODAY).findings if line.startswith("topology: "))
    assert f"{plugin}: " in said and ("no switches" in said) != ordered


def test_nodes_of_several_kinds() -> None:
    nodes = (
        "gpu|idle|3|80|2|40|384000|gpu:v100:2(S:0-1),nvme:3600\n"
        "gpu|allocated|5|128|2|64|512000|gpu:a100:4(IDX:0-3)\n"
        "gpu|drained|9|80|2|40|384000|gpu:v100:2\n"
        "gpu|down*|1|80|2|40|384000|gpu:v100:2\n"
        "gpu|idle*|1|80|2|40|384000|gpu:v100:2\n"
    )
    discovered = found(nodes)
    assert (discovered.profile.node.gpu_type, discovered.profile.node.cores) == ("a100", 128)
    check_text("discovered-several-kinds", "\n".join(discovered.findings))


@pytest.mark.parametrize(
    ("gres", "gpus", "gpu_type"),
    [
        ("(null)", 0, None),
        ("", 0, None),
        ("gpu:2", 2, None),
        ("gpu:h100:8(S:0,1)", 8, "h100"),
        ("nvme:100,gpu:gh200:4", 4, "gh200"),
        ("gpu:a100:2,gpu:a100_1g.5gb:14", 2, "a100"),
        ("gpu:0", 0, None),
        ("craynetwork:4", 0, None),
        ("gpu", 1, None),
        ("gpu:gh200(S:0)", 1, "gh200"),
        ("gpu:tesla:no_consume:4,gpu_mem:81920", 4, "tesla"),
        ("gpu:no_consume:4", 4, None),
        ("gpu:1g.10gb:7(S:0-1),shard:28", 7, "1g.10gb"),
        ("gpu:1g.10gb:7(S:0),gpu:a100:3(S:0-1)", 3, "a100"),
        ("gpu:a100_3g.20gb:2,gpu:a100_1g.5gb:7", 2, "a100_3g.20gb"),
        ("gpu:4k", 0, None),
    ],
)
def test_gpus_of_gres(gres: str, gpus: int, gpu_type: str | None) -> None:
    node = found(f"gpu|idle|1|8|1|8|1000|{gres}\n").profile.node
    assert (node.gpus, node.gpu_type) == (gpus, gpu_type)


def test_the_most_gpus_that_a_node_may_have() -> None:
    """Also of nodes that are down, with slices; where one is not clear, nothing is said of its partition."""
    listed = {"a": ["gpu:a100:2,gpu:1g.5gb:14", "gpu:4"], "b": ["(null)"], "c": ["gpu:4", "gpu:4k"], "d": ["nvme:9"]}
    listed |= {"e": ["nvme:9", "gpu"]}
    lines = [f"{name}|down|1|8|1|8|1000|{gres}\n" for name, each in listed.items() for gres in each]
    assert most_gpus("".join(["odd\n", *lines])) == {"a": 16, "b": 0, "d": 0, "e": 1}


def test_limits_beside_a_named_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    for name, text in (("scontrol", GPU), ("sinfo", A100)):
        program(tmp_path, name, f"cat <<'END'\n{text}\nEND")
    (known,) = known_limits("gpu")
    assert (known.partition, known.total, known.gpus) == ("gpu", 32, 4)
    assert known_limits(None) == (known,) and known_limits("gpu,other") == () == known_limits("other")
    program(tmp_path, "sinfo", "echo what is this; exit 1")
    assert [limits.gpus for limits in known_limits("gpu")] == [None]
    program(tmp_path, "scontrol", "echo PartitionName=; echo odd")
    assert known_limits(None) == ()


@pytest.mark.parametrize(
    ("cpus", "sockets", "each", "cores", "threads"),
    [(128, 2, 32, 64, 2), (64, 2, 32, 64, 1), (60, 2, 32, 60, 1), (16, 1, 4, 4, 4)],
)
def test_cores_are_physical(cpus: int, sockets: int, each: int, cores: int, threads: int) -> None:
    node = found(f"gpu|idle|1|{cpus}|{sockets}|{each}|1000|(null)\n").profile.node
    assert (node.cores, node.threads_per_core) == (cores, threads)


# As scontrol --oneliner prints a node with reserved cores; CPUEfctv is new in 22.05.
RESERVED = "NodeName=g1 CoresPerSocket=56 CPUTot=112 CPUEfctv=104 CoreSpecCount=8 ThreadsPerCore=1 Partitions=gpu,b\n"


@pytest.mark.parametrize(
    ("sinfo", "details", "changed", "cores", "threads", "most"),
    [
        ("112|2|56", RESERVED, {"TRES": "cpu=1,node=1"}, 104, 1, 104),
        ("112|2|56", RESERVED.replace("CPUEfctv=104", ""), {"TRES": ""}, 104, 1, 104),
        ("112|1|56", RESERVED.replace("Core=1", "Core=2").replace("CPUEfctv=104", ""), {"TRES": ""}, 48, 2, 96),
        ("112|2|56", "", {"TRES": "cpu=208,mem=3800000M,node=2"}, 104, 1, 104),
        ("112|2|56", RESERVED.replace("gpu,b", "b"), {"TRES": "(null)"}, 112, 1, 112),
        ("112|2|56", RESERVED, {"MaxCPUsPerNode": "56"}, 56, 1, 56),
        ("112|2|56", RESERVED, {"MaxCPUsPerNode": "UNLIMITED", "MaxCPUsPerSocket": "9"}, 18, 1, 18),
        ("128|2|32", "", {"MaxCPUsPerNode": "9"}, 4, 2, 9),
        ("128|2|32", "", {"MaxCPUsPerNode": "1"}, 1, 2, 1),
    ],
)
def test_cpus_that_a_job_cannot_have(
    sinfo: str, details: str, changed: dict[str, str], cores: int, threads: int, most: int
) -> None:
    answers = Answers(
        nodes=f"gpu|idle|2|{sinfo}|1000|(null)\n",
        config=CONFIG,
        partitions=partition("gpu", Default="YES", **changed),
        mpi=MPI,
        details=details,
    )
    discovered = profile_from(answers, None, TODAY)
    node = discovered.profile.node
    assert (node.cores, node.threads_per_core, discovered.limits[0].cpus) == (cores, threads, most)
    told = f"{cores} of {112 // threads if '112' in sinfo else 64} cores"
    assert any(told in line for line in discovered.findings) == (cores != 112)


@pytest.mark.parametrize(
    ("changed", "memory"),
    [
        ({"OverSubscribe": "EXCLUSIVE", "MaxMemPerNode": "400000"}, "400000M"),
        ({"OverSubscribe": "EXCLUSIVE", "MaxMemPerNode": "900000"}, "0"),
        ({"MaxMemPerNode": "400000"}, None),
        ({"MaxMemPerNode": "400000", "DefMemPerCPU": "3900"}, "400000M"),
        ({"MaxMemPerNode": "UNLIMITED", "DefMemPerCPU": "3900"}, None),
    ],
)
def test_memory_that_a_job_can_have(changed: dict[str, str], memory: str | None) -> None:
    assert found(partitions=partition("gpu", Default="YES", **changed)).profile.node.memory == memory


def test_whole_nodes() -> None:
    profile = found(partitions=partition("gpu", Default="YES", OverSubscribe="EXCLUSIVE")).profile
    assert (profile.node.exclusive, profile.node.memory) == (True, "0")
    linear = found(config=CONFIG.replace("cons_tres", "linear"))
    assert (linear.profile.node.exclusive, linear.profile.node.gpu_option) == (True, "gres")
    check_text("discovered-whole-nodes", "\n".join(linear.findings))


def test_what_a_site_does_not_allow() -> None:
    config = CONFIG.replace("JobRequeue              = 1", "JobRequeue = 0").replace("topology/tree", "topology/none")
    discovered = found(config=config, partitions=partition("gpu", Default="YES", AllowAccounts="a,b"))
    # JobRequeue is what jobs get that do not ask; ours do.
    assert discovered.profile.requeue
    check_text("discovered-not-allowed", "\n".join(discovered.findings))


def test_no_limit_of_time_is_no_time() -> None:
    assert found(partitions=partition("gpu", MaxTime="UNLIMITED")).profile.time is None


@pytest.mark.parametrize(
    ("nodes", "partitions", "asked", "code", "values", "choices"),
    [
        (A100, GPU, "gpus", "HT-slurm-partition-not-usable", {"partition": "gpus"}, "gpu"),
        (
            A100,
            GPU + partition("old", State="DOWN"),
            "old",
            "HT-slurm-partition-not-usable",
            {"partition": "old", "state": "DOWN"},
            "",
        ),
        (A100, partition("gpu", State="INACTIVE"), None, "HT-slurm-partition-not-usable", {}, ""),
        (A100, "", None, "HT-slurm-partition-not-usable", {}, ""),
        (A100, partition("a") + partition("b"), None, "HT-slurm-partition-not-usable", {}, "a, b"),
        (
            "gpu|drained|4|8|1|8|1|(null)\n",
            GPU,
            None,
            "HT-slurm-partition-not-usable",
            {"partition": "gpu", "broken": 4},
            "",
        ),
        (
            A100,
            partition("x", Default="YES"),
            None,
            "HT-slurm-partition-not-usable",
            {"partition": "x", "broken": 0},
            "gpu",
        ),
    ],
)
def test_no_usable_partition(
    nodes: str, partitions: str, asked: str | None, code: str, values: dict[str, object], choices: str
) -> None:
    with refused(code, **values) as caught:
        found(nodes, partitions, asked=asked)
    assert caught.value.hint.endswith(choices)


def test_settings_and_plugins() -> None:
    assert read_config(CONFIG)["SlurmctldHost[0]"] == "ctl(10.0.0.1)"
    plugins = "srun: MPI types are...\nsrun: none\nsrun: pmix_v3\nsrun: pmi2\n"
    assert read_mpi_plugins(plugins) == ["none", "pmi2", "pmix_v3"]
    failed = "PARTITION|STATE\nslurm_load_partitions: error\n"
    assert read_nodes(failed) == {}


LINES = st.text(alphabet=st.sampled_from("gpu|idle:4=,()[]*-_/ \n\t\x00\x0baé²0123456789"), max_size=200)


@given(nodes=LINES | st.just(A100), partitions=LINES | st.just(GPU), config=LINES, mpi=LINES)
def test_any_text_gives_a_profile_or_an_error(nodes: str, partitions: str, config: str, mpi: str) -> None:
    try:
        discovered = found(nodes, partitions, config, mpi)
    except HpctrainError:
        return
    assert isinstance(discovered.profile, ClusterProfile)


@given(
    name=st.text("abcé²\U0001f600&-=\"'\\;$(", min_size=1, max_size=8),
    cluster=st.text(max_size=8),
    cores=st.integers(0, 999),
    time=st.text("0123456789:-UN", max_size=12),
    gpu=st.text("aH1:_.-", max_size=6),
)
def test_odd_names_give_a_profile_or_an_error(name: str, cluster: str, cores: int, time: str, gpu: str) -> None:
    config = f"ClusterName = {cluster}\n"
    try:
        found(f"{name}|idle|1|{cores}|1|{cores}|1|gpu:{gpu}:1\n", partition(name, MaxTime=time), config)
    except HpctrainError as error:
        assert f"partition {name!r}" in error.message or error.code == "HT-slurm-partition-not-usable"


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1).filter(
    lambda text: not text.startswith("-") and not any(character.isspace() for character in text)
)
LIKE_NUMBERS = st.sampled_from(
    ["1e3", "1_0", "0x1f", "1:30", "010", "yes", "null", "~", "2026-01-01", ".5e1", "=", "<<"]
)


@given(word=WORDS | LIKE_NUMBERS, value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
@example(word="1e3", value="a\x85b\u2028c\r\n d: #")
def test_what_is_written_is_read_as_the_same(tmp_path_factory: pytest.TempPathFactory, word: str, value: str) -> None:
    profile = ClusterProfile(name="a", source="b", account=word, environment={"A": value, "B": word})
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_bytes(profile_yaml(profile).encode())
    assert load_profile(str(path)) == profile


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("HT-slurm-not-here"):
        discover(None)


def test_a_controller_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    reason = "slurm_load_partitions: Unable to contact slurm controller"
    with refused("HT-slurm-command-failed", status=1, reason=reason) as caught:
        discover(None)
    assert caught.value.exit_code == 1


def test_a_controller_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sinfo", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("hpctrain.control.schedulers.slurm.discover._SECONDS", 0.1)
    with refused("HT-program-no-answer", program="sinfo", seconds=0.1):
        discover(None)
