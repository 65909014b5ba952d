"""A GPT on 1, 2 and 3 ranks: a plain PyTorch loop's curve in one process, and the same bits after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.run.events import read_events
from support.imported_programs import imported

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "gpt.py"


@pytest.fixture(scope="module")
def program():
    return imported(PROGRAM)


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)]
)
@pytest.mark.long
def test_equals_a_plain_loop(program, mpirun, tmp_path, ranks):
    mpirun(PROGRAM, ranks, str(tmp_path / "out"))
    results = [np.load(tmp_path / f"out-{rank}.npz") for rank in range(ranks)]
    for case in results[0]:
        for result in results:
            np.testing.assert_array_equal(result[case], results[0][case], err_msg=f"{case}: ranks differ")
    for case in program.CASES:
        parameters, losses, test_loss = program.reference(case)
        events = list(read_events(tmp_path / f"out-{case}.jsonl"))
        found = [event.loss for event in events if event.event == "step"]
        # bf16 keeps 8 bits of what is between the layers.
        bound = 0.02 if case == "bf16" else 1e-5
        np.testing.assert_allclose(found, losses, rtol=0, atol=bound, err_msg=case)
        assert found[-1] < found[0] - 0.1
        last = [event for event in events if event.event == "epoch"][-1]
        assert last.test_loss == pytest.approx(test_loss, abs=bound)
        assert 0 < last.test_accuracy < 1
        # Of a processor nobody states a peak.
        assert last.tokens_per_s == pytest.approx(last.samples_per_s * 24)
        assert last.flops_utilisation is None
        if case != "bf16":
            expected = np.concatenate([each.ravel() for each in parameters])
            np.testing.assert_allclose(results[0][case], expected, rtol=0, atol=5e-4, err_msg=case)
    for case in ("micro", "untied"):
        np.testing.assert_array_equal(results[0][f"{case}-resumed"], results[0][case], err_msg=f"{case}, resumed")


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_a_small_run_learns_more_than_how_often_each_byte_comes(hpctrain, tmp_path, backend):
    result = hpctrain("run", "gpt2-124m", "--smoke", "-np", "2", "--backend", backend, "--run-dir", "run")
    assert result.returncode == 0, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["backend"]) == ("done", 300, backend)
    # What a model that knew the frequencies of the validation text itself, and no order, would lose at the least.
    from pydoc_data.topics import topics

    held_out = "".join(topics[name] + "\0" for name in sorted(topics)[::20]).encode()
    counts = np.bincount(np.frombuffer(held_out, np.uint8))
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * np.log(shares)).sum()
    assert 3.0 < entropy < 3.6
    assert summary["metrics"]["test_loss"] < entropy - 0.3
    assert summary["tokens_per_s"] == pytest.approx(64 * summary["samples_per_s"])
    assert "flops_utilisation" not in summary
    assert summary["communication_bytes"] % (300 * 4) == 0 < summary["communication_bytes"]
    assert " tokens/s" in result.stdout
