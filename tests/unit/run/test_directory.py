"""The files of a run, and what an attempt clears away."""

from __future__ import annotations

from unit.report.written_runs import recipe_plan, write_run

from hpctrain.files.whole import temporary
from hpctrain.run.records import RankRecord, read_records, write_record


def test_an_attempt_begins_without_what_killed_processes_left_half_written(tmp_path):
    directory = write_run(tmp_path / "run", recipe_plan(), [])
    leftovers = [temporary(path) for path in (directory.rank(0), directory.rank(1), directory.summary)]
    for path in leftovers:
        path.write_text("{")
    write_record(directory, RankRecord(rank=0, host="n1", pid=7, started=1.0, status="running"))
    assert list(read_records(directory)) == [0]
    directory.begin_attempt(recipe_plan())
    assert not any(path.exists() for path in leftovers)
    assert list(directory.ranks.iterdir()) == []
