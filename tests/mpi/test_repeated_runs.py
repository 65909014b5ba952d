"""``hpctrain run --repeat`` on real ranks: both seeds, a series that goes on, and its report."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from support.launching import Launch


@pytest.mark.long
def test_two_seeds_and_what_is_left_of_them(hpctrain: Launch, tmp_path: Path) -> None:
    command = ["run", "digits", "-np", "2", "--set", "epochs=2", "--set", "median_of=2", "--repeat", "2"]
    result = hpctrain(*command, "--run-dir", "series")
    assert result.returncode == 0, result.stdout
    series = tmp_path / "series"
    summaries = {seed: json.loads((series / f"seed-{seed}" / "summary.json").read_text()) for seed in (7, 8)}
    assert {summary["status"] for summary in summaries.values()} == {"done"}
    medians = [summary["metrics"]["test_accuracy_median"] for summary in summaries.values()]
    # The seed decides the division of the digits and the first parameters.
    assert medians[0] != medians[1]
    found = json.loads((series / "repeats.json").read_text())
    assert [run["value"] for run in found["runs"]] == medians
    assert found["mean"] == pytest.approx(statistics.mean(medians), abs=1e-12)
    assert found["deviation"] == pytest.approx(statistics.stdev(medians), abs=1e-12)
    assert f"{found['mean']:.4f} ± {found['deviation']:.4f}" in result.stdout

    # As if the second seed had never been begun.
    second = series / "seed-8"
    for path in ("events.jsonl", "summary.json"):
        (second / path).unlink()
    shutil.rmtree(second / "checkpoints")
    before = (series / "seed-7" / "events.jsonl").read_bytes()
    result = hpctrain("run", "--resume", "--run-dir", "series")
    assert result.returncode == 0, result.stdout
    assert "series/seed-7 " in result.stdout
    assert (series / "seed-7" / "events.jsonl").read_bytes() == before
    assert json.loads((series / "repeats.json").read_text()) == found

    assert main(["report", str(series)]) == 0
    assert f"{found['mean']:.4f} ± {found['deviation']:.4f}" in (series / "report.html").read_text()
