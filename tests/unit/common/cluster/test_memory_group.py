"""The memory of a control group, of either version of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.cluster.machine import GroupMemory, group_memory

NO_LIMIT_1 = "9223372036854771712\n"


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def read(tmp_path: Path, membership: str) -> GroupMemory | None:
    (tmp_path / "membership").write_text(membership)
    return group_memory(tmp_path / "root", tmp_path / "membership")


def test_version_2_takes_the_outermost_group_with_a_limit_which_counts_all_steps_of_a_job(tmp_path):
    root = tmp_path / "root"
    group(root / "system.slice", memory__max="max\n", memory__events="oom_kill 9\n")
    events = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 0\n"
    group(root / "system.slice/job_5", memory__max="32000000000\n", memory__peak="31900000000\n", memory__events=events)
    group(root / "system.slice/job_5/step_batch", memory__max="16000000000\n", memory__events="oom_kill 0\n")
    found = read(tmp_path, "0::/system.slice/job_5/step_batch\n")
    assert found == GroupMemory(limit=32_000_000_000, peak=31_900_000_000, kills=2)
    assert "32 GB" in str(found) and "31.9 GB" in str(found)


def test_version_1_adds_up_what_each_step_counts(tmp_path):
    job = tmp_path / "root/memory/slurm/uid_0/job_5"
    group(tmp_path / "root/memory", memory__limit_in_bytes=NO_LIMIT_1)
    group(job, memory__limit_in_bytes="1000\n", memory__max_usage_in_bytes="900\n", memory__oom_control="oom_kill 1\n")
    group(job / "step_0", memory__limit_in_bytes="1000\n", memory__oom_control="under_oom 0\noom_kill 2\n")
    membership = "7:cpu,cpuacct:/x\n4:memory:/slurm/uid_0/job_5/step_batch\n0::/\n"
    assert read(tmp_path, membership) == GroupMemory(limit=1000, peak=900, kills=3)


def test_a_container_sees_its_group_as_the_root(tmp_path):
    group(tmp_path / "root", memory__max="1000\n", memory__events="oom_kill 1\n")
    assert read(tmp_path, "0::/somewhere/on/the/host\n") == GroupMemory(limit=1000, peak=None, kills=1)


@pytest.mark.parametrize("membership", ["", "0::/a\n", "4:memory:/a\n", "nonsense\n", "0::/../../etc\n"])
def test_without_a_limit_or_files_there_is_none(tmp_path, membership):
    group(tmp_path / "root/a", memory__max="max\n")
    group(tmp_path / "root/memory/a", memory__limit_in_bytes=NO_LIMIT_1)
    assert read(tmp_path, membership) is None
