"""``hpctrain horovod``: build Horovod for this machine, and check what is built."""

from __future__ import annotations

import typer

from hpctrain.cli.doctor import answer_checks
from hpctrain.cli.options import AsJson
from hpctrain.report.output import answer, tell

app = typer.Typer(
    add_completion=False,
    help="Build Horovod for this machine's MPI and frameworks, and check it.",
    no_args_is_help=True,
)


@app.command()
def build() -> None:
    """Download, adapt, compile, install and test Horovod for the MPI and the frameworks that are installed."""
    from hpctrain.control.horovod.install import build as build_horovod

    built, origin = build_horovod(lambda step: tell(f"horovod: {step}"))
    parts = {"torch": built.torch, "tensorflow": built.tensorflow, "CUDA": built.cuda, "NCCL": built.nccl}
    versions = ", ".join(f"{name} {version}" for name, version in parts.items() if version)
    answer(f"Horovod {built.horovod} ({origin}): {versions}, {built.mpi}")


@app.command()
def check(as_json: AsJson = False) -> None:
    """Show what Horovod is built for and what to do about each missing part; exits 3 if something is missing."""
    from hpctrain.control.horovod.check import report

    answer_checks(report(), as_json=as_json)
