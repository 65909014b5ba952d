"""Makes the plan of a further attempt: the run's own plan, on the hosts of now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.common.checkpoints.layout import checkpoint_path
from hpctrain.common.checkpoints.manifest import CheckpointManifest, read_manifest
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.machine import Machine, same_host, this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.difference import differences, flat, settings
from hpctrain.common.recipes.gpt import GptSettings
from hpctrain.common.recipes.load import mesh_overrides, override_recipe, require_no_overrides
from hpctrain.common.recipes.mesh import parse_mesh
from hpctrain.common.recipes.requirements import has_folder, require_ranks, shard_folder
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory, read_model, resume_command
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import ChangedEvent
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.hosts.arrange import arrange
from hpctrain.control.planning.planner import place_plan, sized
from hpctrain.control.resuming.attempts import (
    Attempt,
    changed_script,
    is_done,
    next_attempt,
    require_attempt_ended,
    run_events,
    script_sha256,
)

# Settings that fix the shape of a checkpoint's state, or the data that it is part of the way through.
_HELD = (
    "model.name",
    "model.classes",
    "model.frozen",
    *(f"model.{key}" for key in GptSettings.model_fields),
    "optimizer.name",
    "data.name",
    "data.limit",
    "data.epoch_samples",
    "data.test_fraction",
    "data.split_seed",
)


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A further attempt: where it begins, its plan on this machine, and warnings for the user.

    ``changed`` has the old and the new value of each setting that differs from earlier attempts, by dotted key, and the
    hashes of a script that does.
    """

    attempt: Attempt
    plan: Plan
    machine: Machine
    changed: Mapping[str, tuple[Any, Any]]
    warnings: tuple[str, ...]

    def begin(self, directory: RunDirectory) -> None:
        """Replace the run's plan by this one, after recording the changes."""
        if self.changed:
            with EventWriter(directory.events) as events:
                events.emit(ChangedEvent(differences=dict(self.changed)))
        directory.begin_attempt(self.plan)


def resumption(directory: RunDirectory, request: TrainingRequest) -> Resumption | None:
    """The next attempt of a run; None if it is done. A dry run does not refuse ranks that still run.

    Raises:
        HpctrainError: the run cannot be resumed, or changes were not accepted.
    """
    before = read_model(directory.plan, Plan)
    asked = request.work or _overridden(before, request)
    if request.tracking is not None:
        asked = (asked or before.work).model_copy(update={"tracking": request.tracking})
    now, changed = changed_work(before, asked, accept=request.accept_changes)
    events = run_events(directory)
    script = changed_script(events, script_sha256(now))
    if changed and is_done(events):
        # A changed recipe can continue a finished run, for example with more epochs.
        events.pop()
    if not request.dry_run:
        require_attempt_ended(directory)
    restarts = before.stop.model_copy(update=request.changes["stop"]).restarts
    attempt = next_attempt(directory, events, restarts, script=before.script is not None)
    if attempt is None:
        return None
    if attempt.iteration:
        require_fit(directory, attempt.iteration, now, changed)
    machine = this_machine()
    plan, warnings = resumed_plan(now, request, machine)
    if request.dry_run:
        warnings += tuple(f"{path} is damaged and would be skipped: {fault}" for path, fault in attempt.damaged)
    if script:
        warnings += (f"{plan.title} is not what it was in the last attempt: its SHA-256 was {script[0]}",)
    if attempt.iteration and not events:
        warnings += (f"{directory.events} is lost, and with it the record of the steps up to {attempt.iteration}",)
    differing = {**changed, **({"script.sha256": script} if script else {})}
    return Resumption(attempt=attempt, plan=plan, machine=machine, changed=differing, warnings=warnings)


def _overridden(plan: Plan, request: TrainingRequest) -> Recipe | Script | None:
    """The run's own recipe or script with other values; None where there are none."""
    overrides, mesh = request.overrides, request.mesh
    if not overrides and mesh is None:
        return None
    if plan.recipe:
        return override_recipe(plan.recipe, [*overrides, *mesh_overrides(mesh)])
    require_no_overrides(plan.title, overrides)
    assert plan.script is not None and mesh is not None
    return plan.script.model_copy(update={"mesh": parse_mesh(mesh)})


def changed_work(
    plan: Plan, work: Recipe | Script | None, *, accept: bool = False
) -> tuple[Plan, dict[str, tuple[Any, Any]]]:
    """The plan with the work that is asked for, and where it differs from the run: old and new value by dotted key.

    Args:
        work: what is asked for; None takes the plan's.

    Raises:
        HpctrainError: it differs and is not accepted; shows all differences.
    """
    begun = plan.work
    if work is None:
        return plan, {}
    if type(begun) is not type(work):
        raise HpctrainError(
            "HT-run-other-settings",
            "the run is of {title}, which is not a {kind}",
            _HINT,
            title=plan.title,
            kind=type(work).__name__.lower(),
        )
    # Trackers are no difference: those asked for replace the run's, which otherwise stay.
    begun = begun.model_copy(update={"tracking": begun.tracking if work.tracking is None else work.tracking})
    work = work.model_copy(update={"tracking": begun.tracking})
    if isinstance(begun, Script) and isinstance(work, Script) and work.path == begun.path:
        # A run continues with the code that was submitted.
        work = work.model_copy(update={"commit": begun.commit, "copied": begun.copied})
    if isinstance(begun, Recipe) and isinstance(work, Recipe) and work.batch.per_rank:
        # A batch per rank is compared at the number of ranks that the run began with.
        work = work.at_data_ranks(max(1, begun.global_batch // work.batch.per_rank))
    if isinstance(begun, Recipe) and isinstance(work, Recipe) and work.batch.micro_batch == "auto":
        # The number that was chosen when the run began stays, whatever ranks and memory there are now.
        kept = begun.batch.micro_batch or "auto"
        work = work.model_copy(update={"batch": work.batch.model_copy(update={"micro_batch": kept})})
    changed = differences(begun, work)
    if changed and not accept:
        table = "\n".join(_table(changed))
        raise HpctrainError(
            "HT-run-other-settings",
            "the run is not what was asked for:\n{table}",
            _HINT_CHANGED,
            table=table,
            differences=changed,
        )
    update: dict[str, object] = {"recipe" if plan.recipe else "script": work if changed else begun}
    if "batch.micro_batch" in changed:
        update["micro_batch_reason"] = ""
    return plan.model_copy(update=update), changed


def _table(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """The old and the new value of each setting, a line each."""
    rows = [("", "the run has", "asked for"), *((key, str(old), str(new)) for key, (old, new) in changed.items())]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"  {key:{first}}  {old:{second}}  {new}" for key, old, new in rows]


_HINT = "--resume without a recipe or script continues the run as it is; another one needs another --run-dir"
_HINT_CHANGED = (
    "--resume without them continues the run as it is; --accept-changes continues it with what was asked for; "
    "another --run-dir starts anew"
)


def require_fit(directory: RunDirectory, iteration: int, plan: Plan, asked: Mapping[str, Any]) -> None:
    """Refuse a recipe that cannot be resumed from an iteration's checkpoint, even if the changes are accepted.

    Args:
        asked: the keys that this resume changes, to tell the user to leave them out.
    """
    if plan.recipe is None:
        return
    path = checkpoint_path(directory.checkpoints, iteration)
    manifest, now = read_manifest(path), settings(plan.recipe)
    saved = flat(manifest.plan.get("recipe") or {})
    changes = {key: (old, now[key]) for key, old in saved if key in now and now[key] != old}
    fixed = set(_fixed_keys(manifest, changes, plan.recipe, in_container=plan.start.container is not None))
    unfit = {key: values for key, values in changes.items() if key in fixed}
    if not unfit:
        return
    hint = "leave that out, or start anew with another --run-dir"
    if not asked.keys() & unfit.keys():
        texts = (f"{key}={old if isinstance(old, str) else json.dumps(old)}" for key, (old, _) in unfit.items())
        hint = resume_command(directory, "--accept-changes", *(word for text in texts for word in ("--set", text)))
    raise HpctrainError(
        "HT-checkpoint-of-other-value",
        "a run cannot resume from {path} with other values than it has:\n{table}",
        hint,
        path=path,
        table="\n".join(_table(unfit)),
        differences=unfit,
    )


def _fixed_keys(
    manifest: CheckpointManifest, changes: Mapping[str, tuple[Any, Any]], recipe: Recipe, *, in_container: bool
) -> Iterator[str]:
    """The keys whose values must be those of the checkpoint, changed or not."""
    yield from _HELD
    if "fp16" in changes.get("precision", ()):
        # The loss scale of fp16 is part of the state.
        yield "precision"
    if recipe.data.name == "digits" and recipe.data.split_seed is None:
        yield "seed"
    if recipe.epochs < manifest.progress.epoch:
        yield "epochs"
    if "data.path" in changes and not in_container and has_folder(recipe):
        # Imported here because it loads NumPy.
        from hpctrain.common.shards.folders import training_fingerprint

        # The same samples may have moved to another folder.
        if training_fingerprint(shard_folder(recipe), recipe.data.name) != manifest.progress.samples:
            yield "data.path"


def resumed_plan(plan: Plan, request: TrainingRequest, machine: Machine) -> tuple[Plan, tuple[str, ...]]:
    """The plan on the current hosts, and warnings.

    Without ranks in the request it gets those that the run began with.

    Raises:
        HpctrainError: another framework, or hosts and ranks that do not fit.
    """
    ranks, framework, changes = request.ranks, request.framework, request.changes
    if framework and framework != plan.framework:
        raise HpctrainError(
            "HT-run-other-settings",
            "the run is in {framework}, and --framework {asked} was asked for",
            _HINT,
            framework=plan.framework,
            asked=framework,
        )
    if ranks is not None:
        require_ranks(ranks)
    changed = {name: getattr(plan, name).model_copy(update=_one_host_source(changes[name])) for name in changes}
    unplaced = plan.model_copy(
        update={
            **changed,
            "asked_backend": request.backend or plan.asked_backend,
            "ranks": ranks or plan.begun_ranks or plan.ranks,
            "begun_ranks": None,
        }
    )
    arranged, warnings = arrange(unplaced.host_options, machine.host, unplaced.ranks, work=plan.work)
    # A job's plan gets its micro-batch on the job's hosts, and keeps it.
    placed = sized(place_plan(unplaced, arranged, machine), machine)
    return placed, (*warnings, *_other_versions(plan, placed))


def plan_without(plan: Plan, gone: Sequence[str], machine: Machine) -> tuple[Plan, tuple[str, ...]]:
    """The plan without the hosts that are gone, on the others in their best order, for one attempt; and warnings.

    Raises:
        HpctrainError: the hosts are too few, or see :func:`hpctrain.control.hosts.arrange.arrange`.
    """
    slots = {host.host: host.slots for host in plan.hosts if not any(same_host(host.host, name) for name in gone)}
    if len(slots) == len(plan.hosts):
        return plan, ()
    ranks, least = sum(slots.values()), plan.recipe.fault_tolerance.min_ranks if plan.recipe else 1
    if ranks < least:
        raise HpctrainError(
            "HT-hosts-too-few",
            "without {hosts} it has hosts for {ranks} ranks, and it needs {least}",
            hosts=fold_hosts([host.host for host in plan.hosts if host.host not in slots]),
            ranks=ranks,
            least=least,
        )
    # The plan keeps the user's own host options, with which a later attempt looks for hosts again.
    named = {"hosts": ",".join(f"{name}:{count}" for name, count in slots.items()), "hostfile": None, "nodes": None}
    arranged, warnings = arrange(plan.host_options.model_copy(update=named), machine.host, ranks, work=plan.work)
    begun = plan.begun_ranks or plan.ranks
    other = plan.model_copy(update={"ranks": ranks, "begun_ranks": None if ranks == begun else begun})
    fewer = place_plan(other, arranged, machine)
    # The network settings found for all hosts hold for the remaining ones.
    return fewer.model_copy(update={"environment": {**plan.environment, **fewer.environment}}), warnings


def _one_host_source(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, with a list of hosts replacing a hostfile and the other way round."""
    other = {"hosts": "hostfile", "hostfile": "hosts"}
    return {**{other[name]: None for name in changes if name in other}, **changes}


def _other_versions(before: Plan, now: Plan) -> Iterator[str]:
    for package, version in before.versions.items():
        if (installed := now.versions.get(package)) != version:
            yield f"{package} was {version} and is now {installed}: numbers may differ from an uninterrupted run's"
