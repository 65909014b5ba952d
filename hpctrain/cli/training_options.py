"""Options about a training, and about how its ranks are started and stopped."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import typer

from hpctrain.cli.options import given
from hpctrain.common.cluster.backends import BACKENDS
from hpctrain.common.cluster.launcher import LAUNCHER
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.load import mesh_overrides
from hpctrain.common.recipes.mesh import AXES
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.tracking import TRACKERS, Tracker, parse_trackers
from hpctrain.common.run.plan import Container, Runtime, Script
from hpctrain.common.secrets import has_credentials, is_secret

Work = TypeVar("Work", Recipe, Script, Recipe | Script)

Restarts = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Restarts in a row without progress after a run fails; 3 by default, 0 for scripts: one with some counts "
        "as resumable whenever it is interrupted.",
    ),
]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Changes to the recipe, and the framework and backend that run it."""

    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the recipe; repeatable.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXIS=RANKS,…",
            help=f"Divide the ranks along {', '.join(AXES)}, such as dp_shard=-1,tp=2; -1 takes what is left.",
        ),
    ] = None
    framework: Annotated[str | None, typer.Option(help="torch or keras; for a recipe.")] = None
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help=f"What reduces gradients: {', '.join(BACKENDS)}; auto by default.",
        ),
    ] = None

    @property
    def of_recipe(self) -> list[str]:
        """The changes to a recipe, with those of ``--mesh``."""
        return [*(self.overrides or ()), *mesh_overrides(self.mesh)]


@dataclass(frozen=True, kw_only=True)
class WorkOptions(TrainingOptions):
    """:class:`TrainingOptions`, with the choices of a smoke run and of trackers."""

    small: Annotated[
        bool,
        typer.Option("--smoke", help="Shrink the recipe so that processors can run all of it; --set changes that."),
    ] = False
    tracking: Annotated[
        str | None,
        typer.Option(
            "--tracking",
            metavar="NAME,…",
            help=f"Where curves go: {', '.join(TRACKERS)}, or none; by default what the recipe says, or tensorboard.",
        ),
    ] = None

    @property
    def trackers(self) -> tuple[Tracker, ...] | None:
        """The trackers of ``--tracking``; None if it was not given."""
        return None if self.tracking is None else parse_trackers(self.tracking)

    def tracked(self, work: Work) -> Work:
        """The recipe or script with the trackers of ``--tracking``."""
        return work if self.trackers is None else work.model_copy(update={"tracking": self.trackers})


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """How ranks are started, for a job as well as from this machine."""

    panel: ClassVar[str] = "How ranks are started"

    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="auto|mpirun|srun-PLUGIN|torchrun",
            help="What starts the ranks: srun with a plugin of `srun --mpi=list`, such as srun-pmix, or srun-none.",
        ),
    ] = None
    container: Annotated[
        str | None, typer.Option("--container", metavar="IMAGE", help="Container image to run the ranks in.")
    ] = None
    container_runtime: Annotated[Runtime | None, typer.Option(help="Container runtime; by default apptainer.")] = None
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SOURCE[:TARGET]", help="Mount a folder into the container; repeatable."),
    ] = None
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="Set a variable for every rank, by default to its value here; repeatable.",
        ),
    ] = None
    share_gpus: Annotated[
        bool | None,
        typer.Option(
            "--share-gpus/--no-share-gpus",
            help="Let ranks of one host share its GPUs over NCCL, to try out a mesh; speeds then mean nothing.",
        ),
    ] = None

    def changes(self) -> dict[str, Any]:
        """The fields of :class:`hpctrain.common.run.plan.Start` that were given.

        Raises:
            HpctrainError: a variable is invalid or has no value, a text has unclosed quotes, or there is
                no such launcher.
        """
        if self.launcher and not re.fullmatch(LAUNCHER, self.launcher):
            raise HpctrainError(
                "HT-choice-unknown",
                "--launcher {launcher}: there is no launcher of this name",
                "choose auto, mpirun, torchrun, srun-none, or srun- and a plugin that `srun --mpi=list` names",
                launcher=self.launcher,
            )
        variables = [_variable(text) for text in self.environment or ()] or None
        return given(
            launcher=self.launcher,
            container=_container(self.container, self.container_runtime, self.mounts),
            environment=variables and {name: value for name, value in variables if not _hidden(name, value)},
            passed=variables and tuple(name for name, value in variables if _hidden(name, value)),
            share_gpus=self.share_gpus,
        )


@dataclass(frozen=True, kw_only=True)
class StartOptions(JobStart):
    """How ranks are started from this machine."""

    python: Annotated[str | None, typer.Option("--python", metavar="PROGRAM", help="The ranks' interpreter.")] = None
    launcher_arguments: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Further arguments for mpirun or srun.")
    ] = None

    def changes(self) -> dict[str, Any]:
        further = given(python=self.python, arguments=_words(self.launcher_arguments))
        return super().changes() | further


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """How ranks are stopped and restarted."""

    panel: ClassVar[str] = "How they are stopped"

    stop_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", min=0.1, max=1e6, help="Time limit of a stop with a checkpoint; 60 by default."),
    ] = None
    restarts: Restarts = None

    def changes(self) -> dict[str, Any]:
        """The fields of :class:`hpctrain.common.run.plan.Stop` that were given."""
        return given(seconds=self.stop_seconds, restarts=self.restarts)


def _container(image: str | None, runtime: Runtime | None, mounts: Sequence[str] | None) -> Container | None:
    if image is None:
        if runtime is not None or mounts:
            raise HpctrainError(
                "HT-option-needs-another",
                "--container-runtime and --mount are for a container",
                "name it: --container IMAGE",
            )
        return None
    return Container(runtime=runtime or "apptainer", image=image, mounts=tuple(mounts or ()))


def _words(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise HpctrainError(
            "HT-option-bad-value", "--launcher-arguments {text}: {reason}", "close the quotes", text=text, reason=error
        ) from error
    return words


def _hidden(name: str, value: str) -> bool:
    """Whether a variable's value must not be written into any file."""
    return is_secret(name) or has_credentials(value)


def _visible_secret(where: str, name: str) -> HpctrainError:
    return HpctrainError(
        "HT-secret-exposed",
        "{option}: a secret on a command line is visible to everyone",
        f"export {name} and give --env {name}, which passes it on to the ranks and writes it nowhere",
        option=where,
    )


def _variable(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise HpctrainError(
            "HT-option-bad-value",
            "--env {name}: {name!r} is not the name of a variable",
            "for example --env NAME=VALUE",
            name=name,
        )
    if has_value and is_secret(name):
        raise _visible_secret(f"--env {name}=…", name)
    if has_value:
        if has_credentials(value):
            raise _visible_secret(f"--env {name}=…, an address with a password or token", name)
        return name, value
    if name not in os.environ:
        hint = f"export {name}=…" if is_secret(name) else f"give it a value: --env {name}=VALUE"
        raise HpctrainError("HT-variable-not-set", "--env {name}: it is not set here", hint, name=name)
    return name, os.environ[name]
