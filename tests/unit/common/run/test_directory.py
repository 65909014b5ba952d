"""The files of a run, and what an attempt clears away."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter

import pytest
from pydantic import BaseModel, field_validator

from hpctrain.common.checkpoints.layout import damaged_checkpoints, iterations
from hpctrain.common.errors import HpctrainError, InvalidValueError
from hpctrain.common.files.whole import temporary
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Start
from hpctrain.common.run.records import RankRecord, read_records, write_record
from support.refusals import check, refused
from support.report.written_runs import recipe_plan, write_run
from support.small_disks import small_disk_at


def test_an_attempt_begins_without_what_killed_processes_left_half_written(tmp_path):
    directory = write_run(tmp_path / "run", recipe_plan(), [])
    leftovers = [temporary(path) for path in (directory.rank(0), directory.rank(1), directory.summary)]
    own = [directory.path / ".download.part", directory.path / "archive.part"]
    for path in (*leftovers, *own):
        path.write_text("{")
    write_record(directory, RankRecord(rank=0, host="n1", pid=7, started=1.0, status="running"))
    assert list(read_records(directory)) == [0]
    directory.begin_attempt(recipe_plan())
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in own)
    assert list(directory.ranks.iterdir()) == []


def test_dumps_of_collectives_are_kept_of_the_newest_attempt(tmp_path):
    directory = write_run(tmp_path / "run", recipe_plan(), [])
    for written in ("1", "2", ""):
        if written:
            directory.flight_recorder.with_name(f"{directory.flight_recorder.name}0").write_text(written)
        directory.begin_attempt(recipe_plan())
    kept = {str(path.relative_to(directory.logs)): path.read_text() for path in directory.logs.rglob("flight*0")}
    assert kept == {"flight-recorder-before/flight-recorder-rank-0": "2"}


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path):
    directory = write_run(tmp_path / "run", recipe_plan(), [])
    assert (read_records(directory), iterations(directory.checkpoints)) == ({}, [])
    shutil.rmtree(directory.ranks, ignore_errors=True)
    for folder in (directory.ranks, directory.checkpoints):
        folder.write_text("")
    unread = []
    assert read_records(directory, unread) == {}
    check(unread[0], "HT-file-unreadable", path=str(directory.ranks))
    for look in (iterations, damaged_checkpoints):
        with refused("HT-file-unreadable", path=directory.checkpoints):
            look(directory.checkpoints)


def test_a_disk_without_room_for_the_plan_keeps_the_directory_free(tmp_path):
    with small_disk_at(tmp_path / "disk", "4k") as disk:
        plan = recipe_plan().model_copy(update={"start": Start(environment={"NAME": "x" * 5000})})
        directory = RunDirectory(disk / "run")
        for _ in range(2):
            with refused("HT-disk-full"):
                directory.create(plan)
            assert list(directory.path.iterdir()) == []
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.ranks.write_text("")
    with refused("HT-file-unwritable"):
        directory.create(plan)
    assert not directory.plan.exists()
    directory.ranks.unlink()
    directory.create(plan)
    with refused("HT-run-directory-taken"):
        directory.create(plan)
    assert directory.plan.exists()


def test_an_option_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
    plan = recipe_plan().model_copy(update={"start": Start(environment={"NAME": os.fsdecode(b"a\xff")})})
    new = RunDirectory(tmp_path / "new")
    with refused("HT-plan-not-utf8"):
        new.create(plan)
    assert not new.path.exists()
    begun = write_run(tmp_path / "begun", recipe_plan(), [])
    before = begun.plan.read_bytes()
    with refused("HT-plan-not-utf8"):
        begun.begin_attempt(plan)
    assert begun.plan.read_bytes() == before


class _Host(BaseModel, extra="forbid"):
    name: str
    slots: int = 1

    @field_validator("slots")
    @classmethod
    def _even(cls, slots: int) -> int:
        if slots % 2:
            raise InvalidValueError("HT-of-test", "{slots} is odd", slots=slots)
        return slots


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        ('{"name": "n1"', "HT-file-not-json", {"key": ""}),
        ("{}", "HT-file-missing-key", {"key": "name"}),
        ('{"name": "n1", "cores": 8}', "HT-file-unknown-key", {"key": "cores"}),
        ('{"name": 7}', "HT-file-value", {"key": "name"}),
        ('{"name": "n1", "slots": 3}', "HT-of-test", {"key": "slots", "slots": 3}),
    ],
)
def test_a_damaged_file_is_named_with_its_key(tmp_path, content, code, values):
    path = tmp_path / "host.json"
    path.write_text(content)
    with refused(code, where=path, **values) as caught:
        read_model(path, _Host)
    assert caught.value.code == code
    assert caught.value.message.startswith(f"{path}: ")


def test_several_faults_of_a_file_are_one_error_with_the_code_of_each(tmp_path):
    path = tmp_path / "host.json"
    path.write_text(json.dumps({"slots": 3, **{f"key{number}": 0 for number in range(28)}}))
    with pytest.raises(HpctrainError) as caught:
        read_model(path, _Host)
    assert caught.value.code == "HT-file-faults"
    found = Counter(fault["code"] for fault in caught.value.values["faults"])
    assert found == {"HT-file-missing-key": 1, "HT-of-test": 1, "HT-file-unknown-key": 18}
    assert caught.value.values["more"] == 10
    assert len(caught.value.message.splitlines()) == 21
