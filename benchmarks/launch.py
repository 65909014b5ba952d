"""What a run costs beside its steps, by the number of hosts: ``python benchmarks/launch.py --hosts 2 4 8 16``.

Each run is 50 steps of digits over the engine ``mpi``, one rank a host, on hosts of their own with links of 0.1 Gbit/s
(``--rate``). All hosts share this machine's cores, so what each rank computes for itself, the import of PyTorch above
all, takes the longer the more there are; on real hosts that is side by side. Needs root, as ``make hosts`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import EndEvent, RunEvent, StartEvent, StepEvent

# Where the hosts are made.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.hosts.local_hosts import LocalHosts, Settings, obstacle
from support.launching import AS_ROOT

# 25 steps an epoch of 1437 samples.
_SETTINGS = ("epochs=2", "batch.size=58", "schedule.warmup_epochs=0")
_STEPS = 50
_LIMIT_SECONDS = 600.0

PARTS = {
    "mpirun": "mpirun of nothing",
    "asked": "hosts are asked",
    "launched": "ranks are launched and import",
    "first": "until the first step is done",
    "steps": f"{_STEPS - 1} more steps",
    "left": "ranks and launcher leave",
    "whole": "whole command",
}


def measure(hosts: LocalHosts, folder: Path) -> dict[str, float]:
    """The seconds of each part of one run."""
    names = ",".join(hosts.names)
    begin = time.time()
    hosts.run("h1", "mpirun", "-np", str(len(hosts.names)), "--host", names, "true", cwd=folder, timeout=_LIMIT_SECONDS)
    nothing = time.time() - begin
    words = [word for setting in _SETTINGS for word in ("--set", setting)]
    run = ("hpctrain", "run", "digits", "-H", names, "--backend", "mpi", *words, "--run-dir", "run")
    begin = time.time()
    hosts.run("h1", *run, cwd=folder, timeout=_LIMIT_SECONDS)
    end = time.time()
    events = list(read_events(folder / "run" / "events.jsonl"))
    steps = [event.time for event in events if isinstance(event, StepEvent)]
    assert len(steps) == _STEPS, f"{len(steps)} steps"
    moments = {kind: next(event.time for event in events if isinstance(event, kind)) for kind in (StartEvent, RunEvent)}
    done = next(event.time for event in events if isinstance(event, EndEvent))
    return {
        "mpirun": nothing,
        "asked": moments[StartEvent] - begin,
        "launched": moments[RunEvent] - moments[StartEvent],
        "first": steps[0] - moments[RunEvent],
        "steps": steps[-1] - steps[0],
        "left": end - done,
        "whole": end - begin,
    }


def table(results: Mapping[int, Mapping[str, float]], rate: str) -> Table:
    """A row for each part, a column for each number of hosts."""
    found = Table("seconds", *(f"{number} hosts" for number in results), title=f"links of {rate}, one rank a host")
    for part, title in PARTS.items():
        found.add_row(title, *(f"{results[number][part]:.2f}" for number in results))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rate", default="100mbit", help="of each link, in tc's words")
    parser.add_argument("--rounds", type=int, default=1, help="runs for each number of hosts; the medians are shown")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := obstacle():
        parser.error(reason)
    results: dict[int, dict[str, float]] = {}
    shared = [Path(__file__).parents[1], Path(sys.prefix).resolve()]
    variables = {"PYTHONPATH": str(Path(__file__).parents[1]), **AS_ROOT}
    for number in options.hosts:
        rounds = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="hpctrain-launch-") as name:
                place = Path(name).parent / f"hpctrain-hosts-{secrets.token_hex(4)}"
                settings = Settings(hosts=number, rate=options.rate)
                with LocalHosts(place, settings, shared=[Path(name), *shared], variables=variables) as hosts:
                    rounds.append(measure(hosts, Path(name)))
        results[number] = {part: statistics.median(each[part] for each in rounds) for part in PARTS}
        print(f"{number} hosts: {results[number]['whole']:.1f} s", file=sys.stderr)
    Console(width=100).print(table(results, options.rate))
    if options.json:
        load = os.getloadavg()[0]
        options.json.write_text(json.dumps({"rate": options.rate, "load": load, "seconds": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
