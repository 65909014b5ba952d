"""What is asked of Slurm: defaults from the profile, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.plan import Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.job_request import further_options, job_request
from hpctrain.control.schedulers.profile import NodeProfile
from hpctrain.control.schedulers.slurm.slurm_scheduler import directives
from support.refusals import refused
from support.schedulers.job_scripts import GPUS, PLAIN


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
    node = NodeProfile(gpus=4, gpu_type="a100")
    profile = PLAIN.model_copy(update={"node": node})
    assert "#SBATCH --gres=gpu:a100:4" in directives(job_request(profile, "digits", {}))
    lines = directives(job_request(profile, "digits", {"sbatch": {"gres": "nvme:100"}}))
    assert [line for line in lines if "gres" in line] == ["#SBATCH --gres=gpu:a100:4,nvme:100"]


def test_a_share_of_the_cores_is_counted_in_slurms_cpus() -> None:
    profile = PLAIN.model_copy(update={"node": NodeProfile(gpus=4, cores=66, threads_per_core=2)})
    assert job_request(profile, "x", {}).cpus_per_task == 32
    assert job_request(profile, "x", {"cpus_per_task": 5}).cpus_per_task == 5


@pytest.mark.parametrize("option", ["mem", "mem-per-cpu", "mem-per-gpu"])
def test_memory_of_the_command_line_replaces_the_profiles(option: str) -> None:
    lines = directives(job_request(GPUS, "x", {"sbatch": {option: "4G"}}))
    assert [line for line in lines if "mem" in line] == [f"#SBATCH --{option}=4G"]


def test_exclusive_on_the_command_line() -> None:
    assert "#SBATCH --exclusive" in directives(job_request(PLAIN, "x", {"sbatch": {"exclusive": None}}))
    lines = directives(job_request(GPUS, "x", {"sbatch": {"exclusive": "user"}}))
    assert [line for line in lines if "exclusive" in line] == ["#SBATCH --exclusive=user"]


def test_the_profile_says_whether_jobs_requeue_themselves() -> None:
    assert job_request(PLAIN, "x", {}).requeue
    assert not job_request(PLAIN.model_copy(update={"requeue": False}), "x", {}).requeue


def test_a_recipes_name_is_made_one_line() -> None:
    assert job_request(PLAIN, "a\nb\x1b", {}).name == "a b "
    assert job_request(PLAIN, "", {}).name == "hpctrain"


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
    ],
)
def test_a_value_is_refused_with_its_option(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        job_request(PLAIN, "digits", asked)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("option", "value", "code", "values"),
    [
        ("nodes", "3", "HT-sbatch-option-set-elsewhere", {"option": "nodes"}),
        ("outpu", "x", "HT-sbatch-option-set-elsewhere", {"option": "outpu"}),
        ("cluster", "b", "HT-sbatch-option-set-elsewhere", {"option": "cluster"}),
        ("Comment", "x", "HT-sbatch-option-not-valid", {"option": "Comment"}),
        ("comment", "a\nb", "HT-file-value", {"key": "sbatch.comment"}),
        ("gres", "gpu:1", "HT-sbatch-option-set-elsewhere", {"option": "gres"}),
    ],
)
def test_further_options_that_are_refused(option: str, value: str, code: str, values: dict[str, str]) -> None:
    with refused(code, **values) as caught:
        job_request(PLAIN, "digits", {"sbatch": {option: value}})
    assert caught.value.exit_code == 2


def test_further_options() -> None:
    given = ["comment=a=b", "--exclude=n1", "contiguous", "x="]
    assert further_options(given) == {"comment": "a=b", "exclude": "n1", "contiguous": None, "x": ""}
    request = job_request(PLAIN, "x", {"sbatch": {"contiguous": None}})
    assert "#SBATCH --contiguous" in directives(request)


def test_tasks_that_share_gpus() -> None:
    asked = TrainingRequest(work=None, start=Start(share_gpus=True))
    fits = job_request(GPUS, "x", {"gpus_per_node": 1, "tasks_per_node": 4})
    assert fits.training(asked).start.share_gpus
    assert {"#SBATCH --gres=gpu:h100:1", "#SBATCH --ntasks-per-node=4"} <= {*directives(fits)}
    for nodes, gpus in ((1, 0), (1, 4), (2, 1)):
        with refused("HT-gpus-not-shareable"):
            job_request(GPUS, "x", {"nodes": nodes, "gpus_per_node": gpus, "tasks_per_node": 4}).training(asked)
