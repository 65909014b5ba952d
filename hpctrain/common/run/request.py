"""What is asked for of a training, and whether it is possible, before its hosts are known. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.families import Framework
from hpctrain.common.recipes.requirements import require_ranks, require_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.tracking import Tracker
from hpctrain.common.run.backend import require_backend
from hpctrain.common.run.plan import HostOptions, Plan, Script, Start, Stop

FRAMEWORKS: tuple[Framework, ...] = ("torch", "keras")


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """What the user asks for: of a new run, of one that is resumed, or of a job.

    Attributes:
        work: the recipe, with the changes of ``--set``, or the script; None to resume a run with its own.
        ranks: their number; None for as many as the hosts have slots, or as the resumed run had.
        backend: one of :data:`hpctrain.common.cluster.backends.BACKENDS`; None for ``auto``, or for what the resumed
            run asked for.
        framework: for a recipe; None for PyTorch where it is installed, else Keras.
        host_options, start, stop: of a resumed run, what was given replaces the plan's.
        overrides: ``key=value`` each, for the recipe or script of the resumed run where ``work`` is None.
        mesh: as ``--mesh`` has it, for the resumed run where ``work`` is None.
        tracking: where the resumed run's curves go; None for where they went, or ``work``'s go.
        accept_changes: resume with another recipe or script than the run was begun with, or with an edited plan.
        run_dir: the run directory; None for a new one.
        submitted: a plan's file, with which a resumed run begins where its directory holds none.
        dry_run: start nothing and write nothing.
        with_data: a recipe needs its data; False to place ranks alone.
    """

    work: Recipe | Script | None
    ranks: int | None = None
    backend: str | None = None
    framework: str | None = None
    host_options: HostOptions = field(default_factory=HostOptions)
    start: Start = field(default_factory=Start)
    stop: Stop = field(default_factory=Stop)
    overrides: tuple[str, ...] = ()
    mesh: str | None = None
    tracking: tuple[Tracker, ...] | None = None
    accept_changes: bool = False
    run_dir: Path | None = None
    submitted: Path | None = None
    dry_run: bool = False
    with_data: bool = True

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """The options that were given, by the names of their groups: they replace those of a resumed run's plan."""
        groups = {"host_options": self.host_options, "start": self.start, "stop": self.stop}
        return {name: {key: getattr(group, key) for key in group.model_fields_set} for name, group in groups.items()}


def unplaced_plan(request: TrainingRequest, frameworks: frozenset[Framework]) -> Plan:
    """The plan of a run whose hosts are not known yet.

    ``auto`` is ``single`` for one rank on this machine, else ``mpi`` where the recipe goes on without ranks that die,
    else the backend of :func:`hpctrain.common.cluster.gpus.fitting_backend`.

    Args:
        request: with its work and ranks.
        frameworks: the installed ones. A container is assumed to have both, since it cannot be seen from outside.

    Raises:
        HpctrainError: fewer than one rank, a mesh that does not fit them, an unknown name, a framework that is not
            installed, a backend that does not serve the framework, the mesh or the recipe, or see
            :func:`hpctrain.common.recipes.requirements.require_recipe`.
    """
    work, ranks, backend = request.work, request.ranks, request.backend or "auto"
    assert work is not None and ranks is not None
    require_ranks(ranks)
    seen = frozenset(FRAMEWORKS) if request.start.container else frameworks
    plan = Plan(
        recipe=work.at(ranks) if isinstance(work, Recipe) else None,
        script=work if isinstance(work, Script) else None,
        framework=_framework(work, seen, request.framework),
        backend=backend,
        asked_backend=backend,
        ranks=ranks,
        host_options=request.host_options,
        start=request.start,
        stop=request.stop,
        threads_per_rank=1,
    )
    require_possible(plan, with_data=request.with_data)
    return plan


def _framework(work: Recipe | Script, installed: frozenset[Framework], framework: str | None) -> Framework | None:
    if isinstance(work, Script):
        if framework:
            raise HpctrainError(
                "HT-option-not-usable-here",
                "--framework {framework} is for recipes: {script} chooses by itself",
                "leave --framework out",
                framework=framework,
                script=work.path.name,
            )
        return None
    chosen = framework or ("keras" if installed == {"keras"} else "torch")
    for known in FRAMEWORKS:
        if chosen == known:
            if known not in installed:
                raise HpctrainError(
                    "HT-package-not-installed",
                    "{framework} is not installed in this Python",
                    f"pip install 'hpctrain[{known}]'",
                    framework=known,
                )
            return known
    raise HpctrainError(
        "HT-choice-unknown", "unknown framework {framework!r}", nearest(chosen, FRAMEWORKS), framework=chosen
    )


def require_possible(plan: Plan, *, with_data: bool = True) -> None:
    """Refuse what no hosts make possible: a mesh, a backend, or values of the recipe for the number of ranks.

    Args:
        with_data: as in :class:`TrainingRequest`.
    """
    _require_framework(plan)
    require_backend(plan.asked_backend, plan)
    if plan.recipe:
        require_recipe(plan.recipe, plan.ranks, with_data=with_data)


def _require_framework(plan: Plan) -> None:
    # Reading the mesh raises where it does not fit the ranks.
    mesh, recipe = plan.mesh, plan.recipe
    if plan.framework != "keras":
        return
    of_pytorch: dict[str, object] = {
        "--share-gpus": plan.start.share_gpus,
        f"the mesh {mesh}": not mesh.replicates_only,
    }
    if recipe:
        of_pytorch |= {
            "its network": "keras" not in recipe.model.family.frameworks,
            "batch.micro_batch: auto, which predicts PyTorch's memory,": recipe.batch.micro_batch == "auto",
            "model.frozen": recipe.model.frozen,
            "optimizer.rates": recipe.optimizer.rates,
            "stochastic_depth": recipe.stochastic_depth,
            "compile: on": recipe.compile == "on",
            "data.decode: gpu": recipe.data.name == "imagenet" and recipe.data.decode == "gpu",
            # Keras reduces gradients after their scaling, so that what overflows or vanishes on the wire is not seen.
            "precision: fp16 with communication.compression: fp16": recipe.precision
            == recipe.communication.compression
            == "fp16",
        }
    if feature := next((name for name, is_asked in of_pytorch.items() if is_asked), None):
        raise HpctrainError(
            "HT-only-in-pytorch",
            "{title} is to run in Keras, and {feature} is for PyTorch",
            "choose --framework torch, or leave it out",
            title=plan.title,
            feature=feature,
        )
