"""The command of each MPI, against files that a person can read.

After a change that is meant: ``REGENERATE=1 python -m pytest tests/unit/control/launchers/test_command.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from hpctrain.common.cluster.launcher import MPI_LAUNCHERS
from hpctrain.common.cluster.machine import Machine
from hpctrain.common.cluster.mpi import Flavour, MpiInstallation
from hpctrain.common.cluster.node_map import Slot
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.plan import Container, Plan, Slots, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.launchers import launcher_choice
from hpctrain.control.launchers.command import Command, Launcher, Srun, Torchrun
from hpctrain.control.launchers.command_line import (
    LaunchSite,
    guarded_daemons,
    launch_command,
    own_threads,
    rank_environment,
    settings_of,
)
from hpctrain.control.launchers.launcher_choice import (
    bindable_cores,
    first_launcher,
    require_choices,
    require_mitigation,
)
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.planning.planner import make_plan
from support import needs
from support.refusals import refused

GOLDEN = Path(__file__).parents[3] / "golden" / "launch"
MACHINE = Machine(host="n1", cores=8, frameworks=frozenset({"torch"}), versions={})
RUN_DIRECTORY = Path("/home/me/it's a run")


def mpi(flavour: Flavour) -> MpiInstallation:
    return MpiInstallation(flavour=flavour, version="0", mpirun=Path("/opt/mpi/bin/mpirun"))


def command(
    flavour: Flavour | Srun | Torchrun | None,
    ranks: int,
    *,
    hosts: dict[str, int] | None = None,
    root: bool = False,
    slurm: dict[str, str] | None = None,
    settings: tuple[str, ...] = (),
    backend: str = "auto",
    overrides: tuple[str, ...] = (),
    **start: object,
) -> Command:
    slots = tuple(Slots(host=name, slots=count) for name, count in (hosts or {}).items())
    plan = make_plan(
        TrainingRequest(work=load_recipe("digits", overrides), ranks=ranks, backend=backend, start=Start(**start)),
        MACHINE,
        PlacedHosts(slots=slots) if slots else None,
    )
    return launch_command(
        plan,
        RUN_DIRECTORY,
        mpi(flavour) if isinstance(flavour, str) else flavour,
        LaunchSite(python=Path("/venv/bin/python"), cores=MACHINE.cores, root=root, slurm=slurm, settings=settings),
    )


UNEVEN = {"n3": 4, "n1": 2}
SRUN = Srun(mpi="pmix")
IN_JOB = {"SLURM_OVERLAP": "1"}
USERS = {"A": "1,2", "OMP_NUM_THREADS": "3"}
SIF = Container(runtime="apptainer", image="/images/it's.sif", mounts=("/data:/data:ro",))
TORCHRUN = Torchrun(node=1)
NGC = Container(runtime="pyxis", image="nvcr.io#nvidia/pytorch:25.01-py3", mounts=("/data", "/a:/b:ro"))
CASES = {
    "single": command(None, 1),
    "srun-pmix": command(SRUN, 6, hosts=UNEVEN, environment=USERS, arguments=("--mem=0",)),
    "srun-pmi2-more-ranks-than-cores": command(Srun(mpi="pmi2"), 18, hosts={"n1": 9, "n2": 9}),
    "srun-pmix-pyxis": command(SRUN, 2, hosts={"n2": 1, "n1": 1}, container=NGC),
    "srun-pmix-apptainer": command(SRUN, 2, hosts={"n2": 1, "n1": 1}, container=SIF),
    "open-mpi-5": command("open-mpi-5", 2),
    "open-mpi-5-apptainer": command("open-mpi-5", 2, container=SIF, python="/opt/conda/bin/python"),
    "open-mpi-5-fault-tolerant": command(
        "open-mpi-5", 6, hosts=UNEVEN, backend="mpi", overrides=("fault_tolerance.lost_rank=shrink",)
    ),
    "open-mpi-5-in-a-job": command("open-mpi-5", 6, hosts=UNEVEN, slurm=IN_JOB),
    "open-mpi-5-oversubscribed": command("open-mpi-5", 2, oversubscribe=True),
    "torchrun": command(TORCHRUN, 6, hosts=UNEVEN, environment=USERS, launcher="torchrun"),
}
for each in get_args(Flavour):
    CASES[f"{each}-more-ranks-than-cores"] = command(each, 9)
    CASES[f"{each}-uneven"] = command(each, 6, hosts=UNEVEN, environment=USERS, arguments=("-v",))


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    text = f"{CASES[name].shell()}\n"
    if os.environ.get("REGENERATE"):
        path.write_text(text)
    assert text == path.read_text(), f"if the change is meant: REGENERATE=1 python -m pytest {__file__}"


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("flavour", get_args(Flavour))
def test_only_open_mpi_is_told_of_the_superuser(flavour: Flavour) -> None:
    added = set(command(flavour, 2, root=True).arguments) - set(command(flavour, 2).arguments)
    assert added == ({"--allow-run-as-root"} if flavour.startswith("open-mpi") else set())


def test_a_python_that_mpirun_could_not_start_guards_no_daemons() -> None:
    """It splits the command of its daemons at spaces."""
    assert "prte_launch_agent" in " ".join(guarded_daemons(RUN_DIRECTORY, Path("/venv/bin/python")))
    assert guarded_daemons(RUN_DIRECTORY, Path("/my venv/bin/python")) == []


def test_the_shell_text_is_the_same_command() -> None:
    value = "1 'x' $y"
    odd = ["a b", "it's", 'say "x"', "$HOME", "`id`", "line\nbreak", "*", "", "--"]
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['A'], 'B' in os.environ]))"
    made = Command(program=(sys.executable, "-c", show, *odd), environment={"A": value}, without=("B",))
    for arguments in (["sh", "-c", made.shell()], list(made.arguments)):
        environment = made.environment_from({**os.environ, "B": "1"}) if arguments[0] != "sh" else {"B": "1"}
        printed = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True).stdout
        assert json.loads(printed) == [odd, value, False]


def test_one_rank_forgets_the_step_around_it() -> None:
    inherited = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"}
    environment = CASES["single"].environment_from(inherited)
    assert "SLURM_STEP_NUM_TASKS" not in environment
    assert environment["SLURM_JOB_ID"] == "7"


def test_pyxis_is_of_srun_alone() -> None:
    with refused("HT-launcher-not-usable-here", launcher="Open MPI 0"):
        command("open-mpi-5", 2, container=NGC)
    with refused("HT-launcher-not-usable-here", launcher="no launcher"):
        command(None, 1, container=NGC)


def test_a_directory_that_a_container_cannot_mount() -> None:
    plan = make_plan(TrainingRequest(work=load_recipe("digits"), ranks=2, start=Start(container=SIF)), MACHINE)
    with refused("HT-container-path-not-mountable", path="/a,b"):
        launch_command(plan, Path("/a,b"), SRUN, LaunchSite(python=Path("python"), cores=1, root=False))


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({}, 8),
        ({"SLURMD_NODENAME": "n1"}, 8),
        # A node beside others on one machine, whose ranks would be bound to the same cores.
        ({"SLURMD_NODENAME": "n2"}, 0),
        ({"SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "0"}, 0),
        # A pod has a share of the time of all cores; the second is of somebody else's Indexed Job.
        ({"HPCTRAIN_POD": "digits"}, 0),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, 8),
    ],
)
def test_cores_that_ranks_can_be_bound_to(
    variables: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.cluster")
    assert bindable_cores(8, variables) == cores


def test_srun_starts_ranks_without_mpi_by_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(backend: str) -> Plan:
        request = TrainingRequest(work=load_recipe("digits"), backend=backend, start=Start(launcher="srun-none"))
        return make_plan(request, MACHINE, PlacedHosts(slots=tuple(Slots(host=f"n{host}", slots=2) for host in "12")))

    monkeypatch.setattr(launcher_choice, "_plugins", list)
    assert first_launcher(plan("auto"), {"SLURM_JOB_ID": "7"}) == Srun(mpi="none")
    assert (plan("auto").backend, plan("auto").backend_reason) == ("gloo", "srun-none")
    with refused("HT-launcher-not-usable-here"):
        first_launcher(plan("gloo"), {})
    for backend in ("mpi", "horovod"):
        with refused("HT-backend-unfit", backend=backend, launcher="srun-none"):
            plan(backend)


def test_torchrun_is_started_on_each_host_by_whoever_is_there() -> None:
    def plan(hosts: int, backend: str = "auto") -> Plan:
        slots = tuple(Slots(host=f"n{host}", slots=2) for host in range(hosts))
        start = Start(launcher="torchrun")
        return make_plan(
            TrainingRequest(work=load_recipe("digits"), backend=backend, start=start), MACHINE, PlacedHosts(slots=slots)
        )

    assert first_launcher(plan(1), {}) == Torchrun(node=0)
    pod = {"HPCTRAIN_POD": "digits", "JOB_COMPLETION_INDEX": "1"}
    assert first_launcher(plan(2), pod) == Torchrun(node=1)
    assert (plan(2).backend, plan(2).backend_reason) == ("gloo", "torchrun")
    with refused("HT-launcher-not-usable-here"):
        first_launcher(plan(2), {})
    with refused("HT-launcher-not-usable-here"):
        first_launcher(plan(1), pod)
    with refused("HT-backend-unfit", backend="mpi"):
        plan(2, "mpi")
    assert MPI_LAUNCHERS == ("mpirun", "srun-pmix", "srun-pmi2"), "a job of Slurm would try it, where nobody asked"


def test_only_open_mpi_5_goes_on_without_a_dead_rank() -> None:
    def refusal(launcher: Launcher, **choices: Any) -> str:
        plan = make_plan(
            TrainingRequest(work=load_recipe("digits", ["fault_tolerance.lost_rank=shrink"]), ranks=2, **choices),
            MACHINE,
        )
        try:
            require_choices(plan)
            require_mitigation(plan, launcher)
        except HpctrainError as error:
            return error.code
        return ""

    assert refusal(mpi("open-mpi-5"), backend="mpi") == ""
    for launcher in (mpi("open-mpi-4"), mpi("mpich-hydra"), mpi("intel-mpi"), SRUN):
        assert refusal(launcher, backend="mpi") == "HT-shrink-not-possible"
    assert refusal(SRUN, backend="mpi", start=Start(launcher="srun-pmix")) == "HT-shrink-not-possible"


def test_an_open_mpi_without_failure_mitigation(tmp_path: Path) -> None:
    plan = make_plan(
        TrainingRequest(work=load_recipe("digits", ["fault_tolerance.lost_rank=shrink"]), ranks=2, backend="mpi"),
        MACHINE,
    )
    info = tmp_path / "ompi_info"
    launcher = dataclasses.replace(mpi("open-mpi-5"), mpirun=tmp_path / "mpirun")
    for word, is_refused in (("yes", False), ("no", True)):
        info.write_text(f"#!/bin/sh\necho options:ft_mpi_support:{word}\n")
        info.chmod(0o700)
        with refused("HT-shrink-not-possible") if is_refused else contextlib.nullcontext():
            require_mitigation(plan, launcher)


@needs.pytorch
def test_ranks_that_heal_have_one_launcher() -> None:
    """Inside a job, too, where others have the first that is installed."""
    job = {"SLURM_JOB_ID": "1"}
    request = TrainingRequest(work=load_recipe("digits", ["fault_tolerance.lost_rank=shrink"]), ranks=2, backend="mpi")
    assert isinstance(first_launcher(make_plan(request, MACHINE), job), MpiInstallation)


def test_a_job_takes_the_first_launcher_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(TrainingRequest(work=load_recipe("digits"), ranks=2, backend="mpi"), MACHINE)

    def none() -> MpiInstallation:
        raise HpctrainError("HT-mpi-not-found", "there is no mpirun")

    monkeypatch.setattr(launcher_choice, "find_mpi", none)
    monkeypatch.setattr(launcher_choice, "_plugins", lambda: ["pmix"])
    assert first_launcher(plan, {"SLURM_JOB_ID": "1"}) == Srun(mpi="pmix")
    monkeypatch.setattr(launcher_choice, "_plugins", list)
    with refused("HT-launcher-none-installed"):
        first_launcher(plan, {"SLURM_JOB_ID": "1"})


def test_settings_of_a_run_are_known_by_their_names() -> None:
    settings = [
        "HF_HUB_OFFLINE",
        "HPCTRAIN_STALL",
        "HPCTRAIN_TIMEOUT",
        "NCCL_DEBUG",
        "OMPI_MCA_btl",
        "PYTHONPATH",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_LOGS",
        "TRITON_CACHE_DIR",
        "UCX_TLS",
        "WANDB_RUN_ID",
    ]
    others = [
        "CUDA_VISIBLE_DEVICES",
        "DISPLAY",
        "HOME",
        "HPCTRAIN_API_KEY",
        "MY_NCCL_DEBUG",
        "PATH",
        "SLURM_JOB_ID",
        "TF_CONFIG",
        "WANDB_API_KEY",
    ]
    assert settings_of(dict.fromkeys([*others, *settings])) == tuple(settings)


@pytest.mark.parametrize("flavour", ["open-mpi-4", "open-mpi-5"])
def test_open_mpi_is_told_which_settings_to_pass_on(flavour: Flavour) -> None:
    """Not those that the plan sets, nor a secret twice that the user passes on."""
    settings = ("HPCTRAIN_BACKEND", "HPCTRAIN_STALL", "OMP_NUM_THREADS", "TOKEN")
    words = command(flavour, 2, hosts={"n1": 1, "n2": 1}, passed=("TOKEN",), settings=settings).launcher
    given = [words[number + 1] for number, word in enumerate(words) if word == "-x"]
    assert [name for name in given if "=" not in name] == ["TOKEN", "HPCTRAIN_STALL"]
    assert len({name.partition("=")[0] for name in given}) == len(given)


def environment(backend: str = "mpi", **start: object) -> dict[str, str]:
    recipe = load_recipe("digits", ["mesh.dp_shard=2"])
    return rank_environment(
        make_plan(TrainingRequest(work=recipe, ranks=4, backend=backend, start=Start(**start)), MACHINE)
    )


def test_ranks_get_their_mesh() -> None:
    assert (
        not {"HPCTRAIN_MESH", "MALLOC_MMAP_THRESHOLD_"}
        & rank_environment(make_plan(TrainingRequest(work=load_recipe("digits"), ranks=4), MACHINE)).keys()
    )
    found = environment()
    assert found["HPCTRAIN_MESH"] == "dp_replicate=2,dp_shard=2,pp=1,cp=1,tp=1"
    assert found["MALLOC_MMAP_THRESHOLD_"] == "131072"


def test_glibc_keeps_its_threshold_on_gpus_and_where_nothing_is_sharded() -> None:
    assert "MALLOC_MMAP_THRESHOLD_" not in environment("nccl")
    assert environment(environment={"MALLOC_MMAP_THRESHOLD_": "1"})["MALLOC_MMAP_THRESHOLD_"] == "1"
    recipe = load_recipe("digits", ["mesh.dp_replicate=4"])
    found = rank_environment(make_plan(TrainingRequest(work=recipe, ranks=4, backend="mpi"), MACHINE))
    assert found["HPCTRAIN_MESH"] == "dp_replicate=4,dp_shard=1,pp=1,cp=1,tp=1"
    assert "MALLOC_MMAP_THRESHOLD_" not in found
    slots = Slots(host="n1", slots=2, places=tuple(Slot(gpu=gpu, adapter=None, cores=()) for gpu in (0, 1)))
    placed = make_plan(
        TrainingRequest(work=load_recipe("digits", ["mesh.dp_shard=2"]), backend="mpi"),
        MACHINE,
        PlacedHosts(slots=(slots,)),
    )
    assert "MALLOC_MMAP_THRESHOLD_" not in rank_environment(placed)


def test_replicas_share_the_threads_of_their_process_and_servers_have_some_to_wait_in() -> None:
    def environment(backend: str) -> dict[str, str]:
        machine = Machine(host="n1", cores=8, frameworks=frozenset({"torch", "keras"}), versions={})
        return rank_environment(
            make_plan(TrainingRequest(work=load_recipe("digits"), ranks=4, backend=backend, framework="keras"), machine)
        )

    names = ("HPCTRAIN_REPLICAS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    assert [environment("mirrored").get(name) for name in names] == ["4", "8", "4"]
    assert [environment("multi_worker").get(name) for name in names] == [None, "2", "1"]
    assert [environment("parameter_server").get(name) for name in names] == [None, "2", "8"]


def test_the_users_number_of_threads_counts_for_all_libraries() -> None:
    """A variable of the run comes before one of the shell; ranks are bound to as many cores as before."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    plan = make_plan(TrainingRequest(work=load_recipe("digits"), ranks=4, start=Start()), MACHINE)
    found = rank_environment(plan, own_threads({"OMP_NUM_THREADS": "3,2", "MKL_NUM_THREADS": "1", "A": "1"}))
    assert [found[name] for name in names] == ["3,2", "1", "3", "3"] and "A" not in found
    found = environment(environment={"OMP_NUM_THREADS": "1"})
    assert [found[name] for name in names] == ["1"] * 4
