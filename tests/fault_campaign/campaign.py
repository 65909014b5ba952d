"""Runs that are hurt in all ways that are known, and what becomes of them.

``python tests/fault_campaign/campaign.py --runs 200 --seed 0``: each case follows from its seed alone, so
``--seed S --runs 1`` repeats one. Exits 1 if any ends otherwise than promised.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

# It is a program too.
sys.path.append(str(Path(__file__).parents[1]))

from fault_campaign import (  # noqa: F401
    kinds_of_chains,
    kinds_of_disks,
    kinds_of_edges,
    kinds_of_files,
    kinds_of_hosts,
    kinds_of_meshes,
    kinds_of_numbers,
    kinds_of_signals,
)
from fault_campaign.cases import KINDS, Case, NotHereError, Result, carry_out, case_of, deck
from fault_campaign.faulted_run import Ended, OutOfTimeError, Place
from fault_campaign.oracle import Outcome, Verdict
from fault_campaign.references import Library

_LIMIT_SECONDS = 120.0
# Of what a run printed that ended otherwise than promised.
_SHOWN = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, help=f"by default each case of the list once: {len(deck())}")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has the next")
    parser.add_argument("--only", metavar="KIND", help="cases of the kinds with this in their name")
    parser.add_argument("--limit", type=float, default=_LIMIT_SECONDS, help="seconds for each command")
    parser.add_argument("--json", type=Path, help="where all results go")
    parser.add_argument("--keep", type=Path, help="where folders of cases go that ended otherwise than promised")
    options = parser.parse_args()
    kinds = [name for name in KINDS if (options.only or "") in name]
    if not kinds:
        parser.error(f"no kind has {options.only!r} in its name: {', '.join(KINDS)}")
    count = options.runs or sum(case_of(number).kind.name in kinds for number in range(len(deck())))
    # What is open is closed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = []
    with tempfile.TemporaryDirectory(prefix="hpctrain-faults-") as folder:
        library = Library(folder=Path(folder) / "whole", limit=options.limit)
        with library.held:
            for case in drawn(options.seed, count, kinds):
                results.append(run(case, Path(folder) / str(case.seed), library, options.keep))
                tell(results[-1])
                if options.json:
                    options.json.write_text(json.dumps([row(result) for result in results], indent=2) + "\n")
    Console(width=120).print(table(results))
    return int(any(result.verdict.outcome in ("lost", "hung") for result in results))


def drawn(seed: int, count: int, kinds: Sequence[str]) -> Iterator[Case]:
    """The next cases of these kinds from a seed on."""
    while count:
        case = case_of(seed)
        if case.kind.name in kinds:
            count -= 1
            yield case
        seed += 1


def run(case: Case, folder: Path, library: Library, keep: Path | None = None) -> Result:
    """One case, of which nothing is left behind, but what ended otherwise than promised in the folder ``keep``."""
    folder.mkdir()
    place = Place(folder=folder, limit=library.limit)
    begin = time.monotonic()
    ends: list[Ended] = []
    printed = ""
    try:
        with contextlib.closing(place):
            verdict, ends = carry_out(case, place, library)
            printed = "\n--- resumed\n".join(end.printed for end in ends)
            if keep and verdict.faults:
                shutil.copytree(folder, keep / str(case.seed))
    except NotHereError as error:
        verdict = Verdict(outcome="not here", faults=(str(error),))
    except OutOfTimeError as error:
        verdict = Verdict(outcome="lost", faults=(str(error),))
    except Exception:
        # Of the campaign itself, or of a run without any fault: the other cases go on all the same.
        verdict, printed = (
            Verdict(outcome="lost", faults=("the case could not be carried out",)),
            traceback.format_exc(),
        )
    return Result(case=case, verdict=verdict, seconds=time.monotonic() - begin, printed=printed, ends=tuple(ends))


def tell(result: Result) -> None:
    case, verdict = result.case, result.verdict
    where = " ".join(filter(None, (case.framework, case.backend, case.mesh)))
    print(f"{case.seed:5} {where:14} {case.kind.name:42} {verdict.outcome:9} {result.seconds:5.1f} s", flush=True)
    if verdict.outcome in ("resumed", "refused"):
        print("\n".join(f"      {line}" for line in _said(result.ends[0])[-1:]), flush=True)
    if verdict.faults:
        print("\n".join(f"      {fault}" for fault in verdict.faults))
        print("      " + result.printed[-_SHOWN:].replace("\n", "\n      "))
        print(f"      again: {command(case)}", flush=True)


def _said(ended: Ended) -> list[str]:
    """What hpctrain said by itself."""
    return [line for line in ended.printed.splitlines() if line.startswith("hpctrain: ")]


def command(case: Case) -> str:
    return f"python tests/fault_campaign/campaign.py --seed {case.seed} --runs 1"


def table(results: Sequence[Result]) -> Table:
    """Kinds of faults against what became of them."""
    outcomes = get_args(Outcome)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for result in results:
        for name in (result.case.kind.name, "all"):
            counts[name][result.verdict.outcome] += 1
            seconds[name] += [end.seconds for end in result.ends[:1] if end.seconds is not None]
    title = "recovered: by itself; resumed: documented exit and resume; seconds: from the fault to the command's end"
    drawn_table = Table("fault", "runs", *outcomes, "median s", "worst s", title=title)
    for column in drawn_table.columns[1:]:
        column.justify = "right"
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        numbers = [counts[name][outcome] for outcome in outcomes]
        took = [f"{statistics.median(seconds[name]):.0f}", f"{max(seconds[name]):.0f}"] if seconds[name] else []
        drawn_table.add_row(name, str(sum(numbers)), *(str(number or "") for number in numbers), *took)
    return drawn_table


def row(result: Result) -> dict[str, object]:
    case, verdict = result.case, result.verdict
    return {
        "seed": case.seed,
        "kind": case.kind.name,
        "framework": case.framework,
        "backend": case.backend,
        "mesh": case.mesh,
        "outcome": verdict.outcome,
        "faults": verdict.faults,
        "seconds": round(result.seconds, 1),
        "seconds_from_fault": [end.seconds and round(end.seconds, 1) for end in result.ends],
        "codes": [end.code for end in result.ends],
        "command": command(case),
    }


if __name__ == "__main__":
    sys.exit(main())
