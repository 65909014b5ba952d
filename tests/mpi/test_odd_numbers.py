"""Numbers that go wrong on one rank: all ranks do the same about it, and it is told which one it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.events import read_events
from support.imported_programs import imported
from support.launching import Launch
from support.refusals import check

PROGRAM = Path(__file__).parent / "programs" / "odd_numbers.py"


program = imported(PROGRAM)


@pytest.mark.parametrize(
    ("ranks", "backend", "framework", "names"),
    [
        (2, "mpi", "torch", "flipped,stop"),
        (2, "mpi", "keras", "flipped"),
        pytest.param(3, "horovod", "torch", "flipped,stop", marks=pytest.mark.thorough),
        pytest.param(3, "horovod", "keras", "flipped", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.long
def test_on_all_ranks_alike(
    mpirun: Launch, tmp_path: Path, ranks: int, backend: str, framework: str, names: str
) -> None:
    for module in (framework, *(["horovod"] if backend == "horovod" else [])):
        pytest.importorskip(module)
    mpirun(PROGRAM, ranks, str(tmp_path), backend, f"{framework}={names}")
    results = [json.loads((tmp_path / f"{framework}-{rank}.json").read_text()) for rank in range(ranks)]
    for name in names.split(","):
        globals()[f"check_{name}"](tmp_path / framework, results)


def odd(folder: Path) -> list[tuple[Any, ...]]:
    events = [event for event in read_events(folder / "events.jsonl") if event.event == "non_finite"]
    return [(event.iteration, event.rule, list(event.ranks)) for event in events]


def check_flipped(folder: Path, results: list[dict[str, Any]]) -> None:
    last = len(results) - 1
    assert odd(folder / "flipped")[0] == (program.BAD_STEP, "skip", [last])
    name = results[last]["flipped"]["flipped"]
    for result in results:
        found = result["flipped"]
        assert found["finite"]
        # The step that found it is not noted.
        assert found["iteration"] == 5
        differ = {"step": 6, "name": name, "sides": [[*range(last)], [last]], "odd": [last] if last > 1 else []}
        check(found["refused"], "HT-parameters-differ", **differ)


def check_stop(folder: Path, results: list[dict[str, Any]]) -> None:
    last = len(results) - 1
    assert odd(folder / "stop") == [(program.BAD_STEP, "stop", [last])]
    for result in results:
        odd_step = {"iteration": program.BAD_STEP, "epoch": 1, "ranks": [last]}
        check(result["stop"]["refused"], "HT-step-not-finite", **odd_step)
        assert result["stop"]["finite"] and result["stop"]["state"].keys() == results[0]["stop"]["state"].keys()
        assert result["stop"]["refused"]["values"]["parameters"]
