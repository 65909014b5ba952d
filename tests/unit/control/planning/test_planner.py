"""Plans: what is chosen where nothing was said, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster import machine as facts
from hpctrain.common.cluster.machine import Machine, same_host, this_machine
from hpctrain.common.cluster.node_map import Slot as Place
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.common.run.plan import Script, Slots, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.launchers.command_line import rank_environment
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.planning.planner import make_plan, oversubscription
from support.refusals import refused

RECIPE = load_recipe("digits")
SCRIPT = Script(path=Path("/home/me/train.py"))
MACHINE = Machine(host="n1", cores=8, frameworks=frozenset({"torch", "keras"}), versions={"torch": "2.13.0"})


def test_defaults() -> None:
    plan = make_plan(TrainingRequest(work=RECIPE), MACHINE)
    assert (plan.ranks, plan.backend, plan.framework, plan.threads_per_rank) == (1, "single", "torch", 8)
    assert plan.versions == {"torch": "2.13.0"}
    assert plan.backend_reason.endswith(" n1")
    assert make_plan(TrainingRequest(work=SCRIPT), MACHINE).framework is None


@pytest.mark.parametrize(("installed", "chosen"), [({"torch"}, "torch"), ({"keras"}, "keras")])
def test_the_framework_that_is_there(installed: set[str], chosen: str) -> None:
    machine = Machine(host="n1", cores=8, frameworks=frozenset(installed), versions={})
    assert make_plan(TrainingRequest(work=RECIPE), machine).framework == chosen


@given(ranks=st.integers(1, 300), cores=st.integers(1, 300))
def test_ranks_never_share_cores_unless_there_are_more_of_them(ranks: int, cores: int) -> None:
    machine = Machine(host="n1", cores=cores, frameworks=frozenset({"torch"}), versions={})
    plan = make_plan(TrainingRequest(work=RECIPE, ranks=ranks), machine)
    assert sum(host.slots for host in plan.hosts) == ranks
    warning = oversubscription(plan, machine)
    if ranks <= cores:
        assert warning is None
        assert cores - ranks < plan.threads_per_rank * ranks <= cores
    else:
        assert plan.threads_per_rank == 1
        assert warning is not None
        assert re.findall(r"n?\d+", warning)[:3] == [str(ranks), str(cores), "n1"]


SHRINK = load_recipe("digits", ["fault_tolerance.lost_rank=shrink"])
ASYNC = load_recipe("digits", ["sync.mode=async"])


def on_keras(name: str, *overrides: str) -> dict[str, Any]:
    return {"work": load_recipe(name, overrides), "ranks": 3, "framework": "keras", "with_data": False}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"ranks": 0}, "HT-ranks-too-few"),
        ({"ranks": -2}, "HT-ranks-too-few"),
        ({"framework": "pytorch"}, "HT-choice-unknown"),
        ({"work": SCRIPT, "framework": "torch"}, "HT-option-not-usable-here"),
        ({"backend": "horvod"}, "HT-choice-unknown"),
        ({"backend": "single", "ranks": 2}, "HT-backend-unfit"),
        ({"backend": "gloo", "framework": "keras"}, "HT-backend-unfit"),
        ({"backend": "mirrored", "framework": "torch"}, "HT-backend-unfit"),
        ({"backend": "parameter_server", "framework": "keras", "ranks": 2}, "HT-backend-unfit"),
        # Only the mpi engine goes on without a rank, and has a parameter server.
        ({"work": SHRINK, "ranks": 2, "backend": "horovod"}, "HT-backend-unfit"),
        ({"work": SHRINK, "ranks": 2, "backend": "gloo"}, "HT-backend-unfit"),
        ({"work": SHRINK, "ranks": 2, "backend": "nccl"}, "HT-backend-unfit"),
        ({"work": ASYNC, "backend": "gloo"}, "HT-backend-unfit"),
        ({"work": ASYNC, "backend": "horovod"}, "HT-backend-unfit"),
        ({"work": ASYNC, "backend": "single"}, "HT-backend-unfit"),
        # Scopes of strategies take plain steps.
        *(
            ({**on_keras("digits", setting), "backend": backend}, "HT-backend-unfit")
            for backend in ("mirrored", "parameter_server")
            for setting in ("batch.micro_batch=8", "communication.compression=bf16")
        ),
        (on_keras("digits", "compile=on"), "HT-only-in-pytorch"),
        (on_keras("digits", "mixing={mixup: 1.0}"), "HT-only-in-pytorch"),
        (on_keras("digits", "averaging={decay: 0.9}"), "HT-only-in-pytorch"),
        (on_keras("digits", "loss=binary_cross_entropy"), "HT-only-in-pytorch"),
        (on_keras("goyal2017", "data.decode=gpu"), "HT-only-in-pytorch"),
        (on_keras("digits", "precision=fp16"), "HT-only-in-pytorch"),
        (on_keras("digits", "model.frozen=['0']"), "HT-only-in-pytorch"),
    ],
)
def test_what_is_refused(options: dict[str, Any], code: str) -> None:
    with refused(code):
        make_plan(TrainingRequest(**{"work": RECIPE, **options}), MACHINE)


def test_no_worker_is_left_of_the_parameter_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_PARAMETER_SERVERS", "2")
    with refused("HT-backend-unfit", backend="parameter_server") as caught:
        make_plan(TrainingRequest(work=SCRIPT, ranks=3, backend="parameter_server"), MACHINE)
    assert "-np 4 or more" in caught.value.hint
    monkeypatch.setenv("HPCTRAIN_PARAMETER_SERVERS", "none")
    with refused("HT-variable-invalid", value="none", valid="a number of ranks above 0"):
        make_plan(TrainingRequest(work=SCRIPT, ranks=3, backend="parameter_server"), MACHINE)


def test_replicas_are_ranks_of_one_process_on_this_machine() -> None:
    plan = make_plan(TrainingRequest(work=RECIPE, ranks=2, backend="mirrored", framework="keras"), MACHINE)
    assert (plan.processes, plan.ranks, plan.needs_launcher) == (1, 2, False)
    assert (
        make_plan(TrainingRequest(work=RECIPE, ranks=2, backend="multi_worker", framework="keras"), MACHINE).processes
        == 2
    )
    hosts = PlacedHosts(slots=(Slots(host="n1", slots=1), Slots(host="n2", slots=1)))
    with refused("HT-backend-unfit", backend="mirrored"):
        make_plan(TrainingRequest(work=RECIPE, backend="mirrored", framework="keras"), MACHINE, hosts)


def with_gpus(gpus: int, **changes: object) -> Machine:
    return dataclasses.replace(MACHINE, gpus=gpus, **changes)


@pytest.mark.parametrize(
    ("work", "machine", "options", "expected"),
    [
        (RECIPE, MACHINE, {}, ("mpi", "no GPU on n1")),
        (RECIPE, MACHINE, {"backend": "horovod"}, ("horovod", "")),
        (RECIPE, with_gpus(1), {}, ("mpi", "1 GPU for 2 ranks on n1")),
        (RECIPE, with_gpus(2), {}, ("nccl", "PyTorch, a GPU for each rank on n1")),
        (RECIPE, with_gpus(2), {"framework": "keras"}, ("horovod", "Keras, a GPU for each rank on n1")),
        (RECIPE, with_gpus(2, versions={"torch": "2.13.0+cpu"}), {}, ("mpi", "PyTorch 2.13.0+cpu is built for CPUs")),
        (SCRIPT, MACHINE, {}, ("mpi", "no GPU on n1")),
        (SCRIPT, with_gpus(2, frameworks=frozenset({"torch"})), {}, ("nccl", "PyTorch, a GPU for each rank on n1")),
        (
            SCRIPT,
            with_gpus(2, versions={"horovod": "0.28.1"}),
            {},
            ("horovod", "a script of either framework, a GPU for each rank on n1"),
        ),
        (SHRINK, with_gpus(2), {}, ("mpi", "fault_tolerance.lost_rank: shrink")),
    ],
)
def test_the_backend_of_two_ranks_and_why(
    work: Recipe | Script, machine: Machine, options: dict[str, str], expected: tuple[str, str]
) -> None:
    plan = make_plan(TrainingRequest(work=work, ranks=2, **options), machine)
    assert (plan.backend, plan.backend_reason) == expected


def test_gpus_are_those_of_the_places() -> None:
    def backend(*gpus: int | None) -> tuple[str, str]:
        places = tuple(Place(gpu=gpu, adapter=None, cores=(0,)) for gpu in gpus)
        full = tuple(Place(gpu=index, adapter=None, cores=(0,)) for index in range(2))
        slots = (Slots(host="n8", slots=2, places=full), Slots(host="n9", slots=len(places), places=places))
        plan = make_plan(TrainingRequest(work=RECIPE), MACHINE, PlacedHosts(slots=slots))
        return plan.backend, plan.backend_reason

    assert backend(0, 1)[0] == "nccl"
    name, reason = backend(0, None)
    assert (name, re.findall(r"n?\d+", reason)) == ("mpi", ["1", "2", "n9"])


def test_a_script_on_gpus_that_only_the_user_knows() -> None:
    with refused("HT-backend-undecided", title="train.py"):
        make_plan(TrainingRequest(work=SCRIPT, ranks=2), with_gpus(2))
    assert make_plan(TrainingRequest(work=SCRIPT, ranks=2, backend="nccl"), with_gpus(2)).backend == "nccl"


def test_more_ranks_left_than_begun_are_refused() -> None:
    work = load_recipe("digits", ["fault_tolerance.lost_rank=shrink", "fault_tolerance.min_ranks=3"])
    with refused("HT-ranks-too-few", bound=3, ranks=2) as caught:
        make_plan(TrainingRequest(work=work, ranks=2), MACHINE)
    assert "-np 3" in caught.value.hint
    assert make_plan(TrainingRequest(work=work, ranks=3), MACHINE).backend == "mpi"


def test_a_framework_that_is_not_installed() -> None:
    nothing = dataclasses.replace(MACHINE, frameworks=frozenset())
    for asked, missing in (("keras", "keras"), (None, "torch")):
        with refused("HT-package-not-installed", framework=missing):
            make_plan(TrainingRequest(work=RECIPE, framework=asked), nothing)


def test_one_rank_on_another_host_needs_a_launcher() -> None:
    def backend(host: str, wanted: str = "auto") -> str:
        hosts = PlacedHosts(slots=(Slots(host=host, slots=1),))
        return make_plan(TrainingRequest(work=RECIPE, backend=wanted), MACHINE, hosts).backend

    assert [backend(host) for host in ("n1", "n1.example.org", "n2", "n11")] == ["single", "single"] + ["mpi"] * 2
    assert backend("n1", "single") == "single"
    with refused("HT-backend-unfit", backend="single") as caught:
        backend("n2", "single")
    assert "this machine, n1, not on n2" in caught.value.message


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("a", "a", True), ("a", "a.x", True), ("a.x", "a.y", False), ("a.x", "a.x", True), ("a", "b", False)],
)
def test_names_of_one_host(one: str, other: str, same: bool) -> None:
    assert same_host(one, other) is same_host(other, one) is same


def test_cores_are_physical_and_within_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert facts.usable_cores() == 2
    # A job's share of its smallest node, where Slurm leaves the affinity alone.
    assert facts.usable_cores({"SLURM_JOB_CPUS_PER_NODE": "4(x2),2"}) == 1
    assert facts.usable_cores({"SLURM_JOB_CPUS_PER_NODE": "64(x128)"}) == 2


def test_keras_needs_tensorflow_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "find_spec", lambda name: None if name == "tensorflow" else object())
    assert this_machine().frameworks == {"torch"}


def test_a_mesh_of_a_recipe_and_of_a_script() -> None:
    recipe = load_recipe("digits", ["mesh.dp_shard=2"])
    script = SCRIPT.model_copy(update={"mesh": Mesh(dp_shard=2)})
    for work in (recipe, script):
        assert make_plan(TrainingRequest(work=work, ranks=4), MACHINE).mesh.sizes["dp_replicate"] == 2
        with refused("HT-ranks-not-divisible", mesh="dp_shard 2", product=2):
            make_plan(TrainingRequest(work=work, ranks=3), MACHINE)
        with refused("HT-backend-unfit", backend="horovod") as caught:
            make_plan(TrainingRequest(work=work, ranks=4, backend="horovod"), MACHINE)
        assert "dp_replicate 2 x dp_shard 2" in caught.value.message
        for backend in ("mpi", "gloo", "nccl"):
            make_plan(TrainingRequest(work=work, ranks=4, backend=backend), MACHINE)
    with refused("HT-only-in-pytorch", title="digits", feature="the mesh dp_shard 2"):
        make_plan(TrainingRequest(work=recipe, ranks=2, framework="keras"), MACHINE)
    make_plan(
        TrainingRequest(
            work=load_recipe("digits", ["mesh.dp_replicate=2"]), ranks=2, framework="keras", backend="horovod"
        ),
        MACHINE,
    )


def test_ranks_that_share_gpus() -> None:
    asked = TrainingRequest(work=RECIPE, ranks=4, start=Start(share_gpus=True))
    plan = make_plan(asked, with_gpus(1))
    assert (plan.backend, plan.backend_reason) == ("nccl", "PyTorch, 4 ranks share GPUs of n1")
    assert rank_environment(plan)["HPCTRAIN_SHARE_GPUS"] == "1"
    assert make_plan(dataclasses.replace(asked, backend="horovod"), with_gpus(2)).backend == "horovod"
    without = make_plan(dataclasses.replace(asked, start=Start()), with_gpus(1))
    assert without.backend == "mpi" and "HPCTRAIN_SHARE_GPUS" not in rank_environment(without)


@pytest.mark.parametrize(
    ("gpus", "changes", "code"),
    [
        (0, {}, "HT-gpus-not-shareable"),
        (4, {}, "HT-gpus-not-shareable"),
        (8, {"backend": "nccl"}, "HT-gpus-not-shareable"),
        (1, {"backend": "mpi"}, "HT-backend-unfit"),
        (1, {"backend": "gloo"}, "HT-backend-unfit"),
        (1, {"framework": "keras"}, "HT-only-in-pytorch"),
        # What only mpi can do.
        (1, {"work": ASYNC}, "HT-backend-unfit"),
    ],
)
def test_gpus_that_cannot_be_shared(gpus: int, changes: dict[str, Any], code: str) -> None:
    asked = TrainingRequest(work=RECIPE, ranks=4, start=Start(share_gpus=True))
    with refused(code):
        make_plan(dataclasses.replace(asked, **changes), with_gpus(gpus))


def test_gpus_of_several_hosts_are_not_shared() -> None:
    hosts = PlacedHosts(slots=(Slots(host="n1", slots=2), Slots(host="n2", slots=2)))
    with refused("HT-gpus-not-shareable", "n2 has ranks", host="n1"):
        make_plan(TrainingRequest(work=RECIPE, start=Start(share_gpus=True)), with_gpus(1), hosts)


def test_a_parameter_server_needs_the_engine_that_has_one() -> None:
    for ranks in (1, 2):
        placed = make_plan(TrainingRequest(work=ASYNC, ranks=ranks), MACHINE)
        assert (placed.backend, placed.backend_reason) == ("mpi", "sync.mode: async")
    # Averaging parameters is a reduction like another.
    assert (
        make_plan(
            TrainingRequest(work=load_recipe("digits", ["sync.every=8"]), ranks=2, backend="gloo"), MACHINE
        ).backend
        == "gloo"
    )


def test_a_gpt_is_pytorchs() -> None:
    recipe = smoke(load_recipe("gpt2-124m"))
    assert make_plan(TrainingRequest(work=recipe, ranks=2), MACHINE).framework == "torch"
    with refused("HT-only-in-pytorch", title="gpt2-124m-smoke", feature="its network"):
        make_plan(TrainingRequest(work=recipe, ranks=2, framework="keras"), MACHINE)
    with refused("HT-recipe-needs-data-path"):
        make_plan(TrainingRequest(work=load_recipe("gpt2-124m"), ranks=2), MACHINE)
