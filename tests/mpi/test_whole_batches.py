"""Small programs as people write them train on ranks as on one process, to the last digits but few."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "whole_batches.py"
# What PyTorch does not tell of, by the code of its refusal.
REFUSED: dict[str, str] = {}


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(2, "mpi", marks=pytest.mark.long),
        pytest.param(3, "gloo", marks=pytest.mark.long),
    ],
)
def test_each_program_equals_one_process(mpirun, tmp_path, ranks, backend):
    # One start of the ranks serves all programs.
    mpirun(PROGRAM, 1, str(tmp_path / "one"))
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), HPCTRAIN_TIMEOUT="120", HPCTRAIN_BACKEND=backend)
    whole = json.loads((tmp_path / "one-0.json").read_text())
    results = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(ranks)]
    assert len(whole) > 80
    for name, one in whole.items():
        assert not one["refused"], name
        for result in results:
            assert result[name]["refused"] == REFUSED.get(name, ""), result[name].get("trace")
            if name not in REFUSED:
                assert result[name]["values"] == pytest.approx(one["values"], rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize(
    ("other", "code"), [("calls", "HT-ranks-in-different-calls"), ("waits", "HT-ranks-in-different-places")]
)
def test_what_one_rank_alone_computes_of_a_batch_is_named_with_both_lines(mpirun, other, code):
    program = PROGRAM.with_name("whole_batch_on_one_rank.py")
    lines = program.read_text().splitlines()
    median, elsewhere = (
        next(number for number, line in enumerate(lines, 1) if text in line)
        for text in ("out.median()", "out.mean()" if other == "calls" else "comm.barrier()")
    )
    begin = time.monotonic()
    result = mpirun(program, 2, other, check=False, HPCTRAIN_TIMEOUT="400", timeout=200)
    assert time.monotonic() - begin < 100
    assert result.returncode != 0
    assert set(codes(result.stdout)) == {code}
    assert result.stdout.count("loss ") == 2  # what is computed by all may be shown by one
    for line in (median, elsewhere):
        assert f"{program.name}:{line}" in result.stdout
    assert "take it out of the condition" in result.stdout
