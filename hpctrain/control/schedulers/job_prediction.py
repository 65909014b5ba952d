"""Predicts the time, memory and energy of a job, where its cluster's GPUs are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Script
from hpctrain.control.schedulers.slurm.submission import PreparedJob

if TYPE_CHECKING:
    from hpctrain.control.predict.hardware import Hardware
    from hpctrain.control.predict.run_prediction import RunPrediction

# NumPy and the constants take 0.3 s, so they are imported below, only for jobs with a prediction.

# Fields of a recipe that do not change its prediction, so that most tasks of an array share one.
_IRRELEVANT_FIELDS = ("seed",)
_MOST_PREDICTIONS = 20


def named_gpu(job: PreparedJob, gpu: str | None) -> str | None:
    """The GPU that predictions are for: the one asked for, else the profile's; None where neither is named.

    Args:
        gpu: the value of ``--gpu``, None without that option.
    """
    known = job.profile.node.gpu
    # A job that requests no GPU does not get those of the profile.
    return gpu or (known if known == "cpu" or job.request.gpus_per_node else None)


def predict_job(job: PreparedJob, work: Recipe | Script, gpu: str) -> RunPrediction:
    """The prediction for a job, or for one task of an array.

    Args:
        work: the recipe as :func:`hpctrain.control.schedulers.preparation.prepare` got it.
        gpu: the result of :func:`named_gpu`; a value of ``--gpu`` was checked.

    Raises:
        HpctrainError: it is a script, ranks share GPUs, or the profile's GPU is not known.
    """
    from hpctrain.control.predict.run_prediction import predict_run

    if isinstance(work, Script):
        raise HpctrainError(
            "HT-prediction-of-script",
            "{script} is a script, and its network is not known before it runs",
            script=work.path.name,
        )
    return predict_run(work, job.plan, _hardware(job, gpu), job.request.nodes)


def predict_jobs(
    job: PreparedJob, works: Mapping[int | None, Recipe | Script], gpu: str | None
) -> dict[int | None, RunPrediction]:
    """The prediction for each run of a job for which there is one, by its task; empty where no GPU is named.

    An array gets predictions for its first tasks that differ in more than their seed.
    """
    named = named_gpu(job, gpu)
    made: dict[str, RunPrediction] = {}
    found: dict[int | None, RunPrediction] = {}
    if named is None:
        return found
    for task, work in works.items():
        key = work.model_dump_json(exclude=set(_IRRELEVANT_FIELDS))
        try:
            if key not in made and len(made) < _MOST_PREDICTIONS:
                made[key] = predict_job(job, work, named)
        except HpctrainError:
            return found
        if key in made:
            found[task] = made[key]
    return found


def _hardware(job: PreparedJob, gpu: str) -> Hardware:
    from hpctrain.common.cluster.gpu_models import gpus
    from hpctrain.control.predict.compute import CPU
    from hpctrain.control.predict.hardware import Hardware

    request = job.request
    if gpu != CPU:
        if gpu not in gpus():
            raise HpctrainError(
                "HT-prediction-unknown-gpu",
                "no GPU is known as {gpu}, the node.gpu of {profile}",
                gpu=gpu,
                profile=job.profile.name,
            )
        if 0 < request.gpus_per_node < request.tasks_per_node:
            raise HpctrainError(
                "HT-prediction-gpus-shared",
                "{ranks} ranks share {gpus} GPUs of a node, and a prediction is for ranks with a GPU each",
                ranks=request.tasks_per_node,
                gpus=request.gpus_per_node,
            )
    stated = Hardware(gpu=gpu, gpus_per_node=request.tasks_per_node, fabric=job.plan.host_options.fabric)
    return stated.completed(job.profile.node)
