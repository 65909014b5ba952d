"""The ``hpctrain`` command. Each of its commands is imported when it is called, so that ``--help`` is quick."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.extras import missing_extra
from hpctrain.report.output import answer, answer_json, tell

# name: (module, its function or Typer application, help)
_COMMANDS = {
    "run": ("hpctrain.cli.run", "run", "Train a recipe, or run a script, on one or more ranks."),
    "verify": ("hpctrain.cli.verify", "verify", "Prove that ranks compute what one process computes."),
    "submit": ("hpctrain.cli.submit", "submit", "Submit a training to Slurm."),
    "plan": ("hpctrain.cli.plan", "plan", "Show what a run would be: ranks, hosts in order, environment."),
    "predict": ("hpctrain.cli.predict", "predict", "Predict time, scaling, memory and energy of a training."),
    "recipes": ("hpctrain.cli.recipes", "app", "List, show and check recipes."),
    "topology": ("hpctrain.cli.topology", "app", "See the fabric, place ranks on it, and check its links."),
    "data": ("hpctrain.cli.data", "app", "Make, check and stage the shards of ImageNet."),
    "status": ("hpctrain.cli.status", "status", "Show the state of a run or its job."),
    "logs": ("hpctrain.cli.logs", "logs", "Read what the ranks of a run print."),
    "cancel": ("hpctrain.cli.cancel", "cancel", "End a run and its jobs."),
    "checkpoint": ("hpctrain.cli.checkpoint", "app", "See, check and export the checkpoints of a run."),
    "report": ("hpctrain.cli.report", "report", "Write the report of a run."),
    "bench": ("hpctrain.cli.bench", "app", "Measure what training costs on this machine."),
    "doctor": ("hpctrain.cli.doctor", "doctor", "Check machine and cluster before a run."),
    "horovod": ("hpctrain.cli.horovod", "app", "Build Horovod for this environment, and check it."),
}
# No list has those that no user calls: a job script does.
_HIDDEN = {"job": ("hpctrain.cli.submit", "job", "Do in a job what its script leaves to hpctrain.")}


# The base of Typer's errors, which has a copy of Click; one about an unknown option has ``possibilities``.
_USAGE_ERROR: Any = typer.BadParameter.__base__

_NP = "-np N is the number of ranks, and -H HOST:SLOTS,… names hosts"
_NODES = "--nodes N with --gpus-per-node G is the number of ranks"
# The commands whose unknown options may be the script's, keys of a recipe, or another launcher's.
_NUMBER_OF_RANKS = {
    "run": _NP,
    "verify": _NP,
    "plan": _NP,
    "submit": f"{_NODES}, or with --tasks-per-node T",
    "predict": _NODES,
}


def _unknown(word: str) -> HpctrainError:
    """The error for a word that is no command, with the command that is probably meant."""
    from hpctrain.common.recipes.entries import recipe_names

    if word.endswith((".py", ".yaml")) or word in recipe_names():
        hint = f"hpctrain run {word}"
    else:
        hint = nearest(word, _COMMANDS)
    return HpctrainError("HT-command-unknown", "there is no command {name!r}", hint, name=word)


class _Commands(TyperGroup):
    """The commands by name and help; each is loaded when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _COMMANDS or args[0] in _HIDDEN:
            self.commands[args[0]] = _load(args[0], helps="--help" in args)
        elif not args[0].startswith("-") and not ctx.resilient_parsing:
            raise _unknown(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        words = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except _USAGE_ERROR as error:
            if hasattr(error, "possibilities") and error.ctx.info_name in _NUMBER_OF_RANKS:
                raise _unknown_option(error, words) from error
            raise


def _load(name: str, *, helps: bool) -> Any:
    module, attribute, help_text = (_COMMANDS | _HIDDEN)[name]
    command = getattr(import_module(module), attribute)
    if not isinstance(command, typer.Typer):
        function, command = command, typer.Typer(add_completion=False)
        command.command(help=help_text if not function.__doc__ else None)(function)
    if not helps:
        command.rich_markup_mode = None
    return typer.main.get_command(command)


def _unknown_option(error: Any, words: Sequence[str]) -> HpctrainError:
    """The error for an option that a command does not have, of another launcher or of the script among the words."""
    command, option = error.ctx.info_name, error.option_name
    script = next((word for word in words if word.endswith(".py")), None)
    of_work = "--set KEY=VALUE sets a value of a recipe"
    if script:
        of_work = f"options of the script stand behind --: hpctrain {command} … {script} -- {option} …"
    known = [name for parameter in error.ctx.command.params for name in parameter.opts if name.startswith("-")]
    return HpctrainError(
        "HT-option-unknown",
        "hpctrain {command} has no option {option}",
        f"{of_work}; {_NUMBER_OF_RANKS[command]}; {nearest(option, known)}",
        command=command,
        option=option,
    )


# Rich, which groups the options in a command's help, takes a tenth of a second even for one line about a typing error.
app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
for _name, (_, _, _help) in _COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        import hpctrain
        from hpctrain.commit import of_this_package

        commit = of_this_package()
        answer(f"{hpctrain.__version__} ({f'commit {commit}' if commit else 'no commit known'})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    """One training script or published recipe, from a laptop to a cluster: the same command, the same numbers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. A user's mistake is one message on stderr and an exit code, with --json JSON on stdout."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # The name of a file need not be UTF-8. Its bytes are printed unchanged, so that a printed command runs.
        sys.stdout.reconfigure(errors="surrogateescape")
    # It says in two long lines that a home folder cannot be written to, where it goes on without.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        app(args=arguments, prog_name="hpctrain")
    except HpctrainError as error:
        return _print_error(error, arguments)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        return _print_error(missing, arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _print_error(error: HpctrainError, arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if "--json" in itertools.takewhile(lambda word: word != "--", words):
        # Stdout may be what cannot be written.
        with contextlib.suppress(OSError):
            answer_json({"error": error.record()})
    tell(f"hpctrain: {error}")
    return error.exit_code
