"""What is asked of Slurm: defaults from the profile, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from job_scripts import GPUS, PLAIN

from hpctrain.batch.directives import directives
from hpctrain.batch.request import array_tasks, further_options, job_request
from hpctrain.cluster.profile import ClusterProfile, Node
from hpctrain.errors import HpctrainError


def test_a_task_a_gpu_with_its_share_of_the_cores() -> None:
    request = job_request(GPUS, "digits", {"nodes": 3})
    assert (request.gpus_per_node, request.tasks_per_node, request.cpus_per_task, request.ranks) == (4, 4, 16, 12)


def test_one_task_a_node_where_there_are_no_gpus() -> None:
    request = job_request(PLAIN, "digits", {})
    assert (request.nodes, request.tasks_per_node, request.cpus_per_task) == (1, 1, None)
    lines = "\n".join(directives(request))
    assert "gpu" not in lines and "gres" not in lines and "cpus-per-task" not in lines


def test_the_command_line_goes_before_the_profile() -> None:
    asked = {"gpus_per_node": 2, "partition": "short", "time": "10", "sbatch": {"comment": "mine", "reservation": "r"}}
    request = job_request(GPUS, "digits", asked)
    assert (request.tasks_per_node, request.cpus_per_task, request.partition, request.time) == (2, 32, "short", "10")
    assert request.sbatch == {"mail-type": "END,FAIL", "comment": "mine", "reservation": "r"}


def test_gpus_as_gres() -> None:
    node = Node(gpus=4, gpu_type="a100", gpu_option="gres")
    request = job_request(PLAIN.model_copy(update={"node": node}), "digits", {})
    assert "#SBATCH --gres=gpu:a100:4" in directives(request)


def test_jobs_of_a_chain_do_not_requeue_themselves() -> None:
    assert job_request(PLAIN, "x", {}).requeue
    assert not job_request(PLAIN, "x", {"chain": 2}).requeue
    assert not job_request(PLAIN.model_copy(update={"requeue": False}), "x", {}).requeue


def test_a_recipes_name_is_made_one_line() -> None:
    assert job_request(PLAIN, "a\nb\x1b", {}).name == "a b "
    assert job_request(PLAIN, "", {}).name == "hpctrain"


@pytest.mark.parametrize(
    ("spec", "tasks"),
    [("3", (3,)), ("0-3", (0, 1, 2, 3)), ("7,1-2%1", (1, 2, 7)), ("0-15:4%2", (0, 4, 8, 12)), ("1,1-2", (1, 2))],
)
def test_tasks_of_an_array(spec: str, tasks: tuple[int, ...]) -> None:
    assert array_tasks(spec) == tasks


@pytest.mark.parametrize("spec", ["", "a", "3-1", "0-3:0", "0-3%0", "0-3%", "0-", "-1", "0-999999", "0 1", "٣"])
def test_no_array(spec: str) -> None:
    with pytest.raises(HpctrainError, match=r"^--array: "):
        job_request(PLAIN, "x", {"array": spec})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"nodes": 0}, "--nodes: "),
        ({"tasks_per_node": 0}, "--tasks-per-node: "),
        ({"cpus_per_task": 0}, "--cpus-per-task: "),
        ({"gpus_per_node": -1}, "--gpus-per-node: "),
        ({"time": "tomorrow"}, "--time: "),
        ({"name": "a\nb"}, "--job-name: "),
        ({"name": ""}, "--job-name: "),
        ({"partition": "a b"}, "--partition: "),
        ({"account": "a\n#SBATCH --nodes=99"}, "--account: "),
        ({"qos": "-x"}, "--qos: "),
        ({"dependency": ""}, "--dependency: "),
        ({"chain": 0}, "--chain: "),
        ({"chain": 2, "array": "0-1"}, "--chain and --array"),
        ({"sbatch": {"nodes": "3"}}, "use --nodes"),
        ({"sbatch": {"Comment": "x"}}, "'Comment'"),
        ({"sbatch": {"comment": "a\nb"}}, "one line"),
        ({"sbatch": {"gres": "gpu:1"}}, "GPUs"),
    ],
)
def test_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        job_request(PLAIN, "digits", asked)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_more_than_the_cluster_has() -> None:
    small = PLAIN.model_copy(update={"max_nodes": 2, "node": Node(cores=4)})
    with pytest.raises(HpctrainError, match="--nodes 3: a job on plain has at most 2"):
        job_request(small, "x", {"nodes": 3})
    with pytest.raises(HpctrainError, match="--tasks-per-node 5: a node of plain has 4 cores"):
        job_request(small, "x", {"tasks_per_node": 5})


@pytest.mark.parametrize("name", ["TERM", "KILL", "STOP", "12", "NOPE"])
def test_a_signal_that_cannot_announce_the_end(name: str) -> None:
    with pytest.raises(HpctrainError, match="cannot announce the end"):
        job_request(ClusterProfile(name="c", source="s", signal=name), "x", {})


def test_further_options() -> None:
    given = ["comment=a=b", "--exclude=n1", "contiguous", "x="]
    assert further_options(given) == {"comment": "a=b", "exclude": "n1", "contiguous": None, "x": ""}
    request = job_request(PLAIN, "x", {"sbatch": {"contiguous": None}})
    assert "#SBATCH --contiguous" in directives(request)
