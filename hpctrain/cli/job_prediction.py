"""The prediction of ``hpctrain submit``: shown in a dry run, and kept in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Script
from hpctrain.control.schedulers.job_prediction import named_gpu, predict_job, predict_jobs
from hpctrain.control.schedulers.slurm.submission import PreparedJob
from hpctrain.report.output import tell


def print_prediction(job: PreparedJob, work: Recipe | Script, gpu: str | None) -> None:
    """Print the prediction for a job, or for the first task of an array; or why there is none."""
    named = named_gpu(job, gpu)
    if isinstance(work, Script) and gpu is None:
        return
    tell("\n# Prediction")
    if named is None:
        tell(f"none: the profile {job.profile.name} names no GPU; node.gpu in a profile does, or --gpu NAME")
        return
    try:
        found = predict_job(job, work, named)
    except HpctrainError as error:
        tell("\n".join([f"none: {error.message}", *_network_keys(job), *_shared_memory(job, named)]))
        return
    from hpctrain.cli.tables import print_table
    from hpctrain.control.schedulers.slurm.time_limit import deadline_lines, time_lines
    from hpctrain.report.prediction import prediction_notes, prediction_table

    print_table(prediction_table(found.prediction), stderr=True)
    lines = prediction_notes(found.prediction, explain=False)
    if minutes := found.minutes:
        about_time = deadline_lines if job.profile.kubernetes else time_lines
        lines += about_time(job.request, 60 * minutes.low, 60 * minutes.high)
    lines += [f"warning: {text}" for text in (found.memory_warning, *found.prediction.warnings) if text]
    tell("\n".join([*lines, *_network_keys(job)]))


def _shared_memory(job: PreparedJob, named: str) -> list[str]:
    """A warning if ranks that share GPUs have no room in the memory of these."""
    from hpctrain.common.cluster.gpu_models import gpu, gpus
    from hpctrain.control.predict.run_prediction import shared_memory_warning

    if not job.plan.start.share_gpus or named not in gpus():
        return []
    text = shared_memory_warning(job.plan, gpu(named).memory_bytes, job.request.gpus_per_node)
    return [f"warning: {text}"] if text else []


def _network_keys(job: PreparedJob) -> list[str]:
    """The profile's keys that would describe the network; ``submit`` has no options for it, unlike ``plan``."""
    node = job.profile.node
    if job.request.nodes == 1 or None not in (node.adapters, node.link_gbit):
        return []
    return ["node.adapters and node.link_gbit in a profile say what the network between nodes is"]


def prediction_records(
    job: PreparedJob, works: Mapping[int | None, Recipe | Script], gpu: str | None
) -> dict[int | None, dict[str, Any]]:
    """The content of prediction.json for each run of a job, by task; runs without a prediction are left out."""
    found = predict_jobs(job, works, gpu)
    if not found:
        return {}
    from hpctrain.report.prediction import prediction_record

    return {task: prediction_record(each.prediction) for task, each in found.items()}
