"""``hpctrain bench``: ratios between alternatives, measured in one run on real ranks."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.errors import HpctrainError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure what training costs on this machine.")

Row = dict[str, Any]


@app.callback()
def _group() -> None: ...


@app.command()
def step(
    ranks: Annotated[int, typer.Option("-np", metavar="N", help="How many ranks.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each variant, after a warm-up of 5.")] = 50,
    batch: Annotated[int, typer.Option(min=1, help="Samples a rank.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """One training step of a convnet of 13 million parameters: without communication (the limit), over Horovod's own
    optimizer, and through hpctrain, over the same Horovod build, interleaved.
    """
    seconds = _measure("step", ranks, str(rounds), str(batch))
    rows = compare(seconds, limit="no communication", reference="horovod by hand")
    if as_json:
        typer.echo(json.dumps({"ranks": ranks, "batch": batch, "rows": rows}))
    else:
        _print(rows, f"one step on {ranks} ranks, {batch} samples each, {rounds} rounds")


def compare(seconds: dict[str, list[float]], *, limit: str, reference: str) -> list[Row]:
    """Medians, and the medians of the ratios round by round, which a drift of the machine's speed leaves alone."""

    def ratio(variant: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[variant], seconds[other], strict=True))

    return [
        {
            "variant": variant,
            "median_s": statistics.median(times),
            "ratio_to_limit": ratio(variant, limit),
            "ratio_to_horovod": ratio(variant, reference),
        }
        for variant, times in seconds.items()
    ]


def _measure(script: str, ranks: int, *arguments: str) -> dict[str, list[float]]:
    """Run one of hpctrain.bench's scripts on ranks; returns what it wrote."""
    import hpctrain
    from hpctrain.launch.start import find_launcher, launch_plan
    from hpctrain.plan import Script
    from hpctrain.planning.machine import this_machine
    from hpctrain.planning.planner import make_plan
    from hpctrain.rundir import RunDirectory

    path = Path(hpctrain.__file__).parent / "bench" / f"{script}.py"
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        out = Path(folder) / "seconds.json"
        machine = this_machine()
        plan = make_plan(Script(path=path, arguments=(str(out), *arguments)), machine, ranks=ranks, backend="horovod")
        directory = RunDirectory(Path(folder) / "run")
        mpi = find_launcher(plan, Path(folder))
        failure = launch_plan(plan, directory, machine, mpi, line=lambda text: print(text, file=sys.stderr))
        if failure:
            raise HpctrainError(str(failure), exit_code=1)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def _print(rows: list[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("variant", "median", "to the limit", "to Horovod by hand", title=title)
    for row in rows:
        cells = (f"{row['median_s'] * 1e3:.1f} ms", f"{row['ratio_to_limit']:.3f}", f"{row['ratio_to_horovod']:.3f}")
        table.add_row(row["variant"], *cells)
    Console().print(table)
