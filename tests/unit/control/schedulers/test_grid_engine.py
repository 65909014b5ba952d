"""What a job asks of a Grid Engine, whose resources have another meaning at each site."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.qsub import grid_engine
from hpctrain.control.schedulers.qsub.grid_engine import GridEngine
from support.refusals import refused

PROFILE = ClusterProfile(name="here", source="the tests", qsub=("-pe mpi {ranks}",))


def asked(monkeypatch: pytest.MonkeyPatch, *rows: str, memory: str | None = "6G", exclusive: bool = False) -> list[str]:
    listed = "\n".join(["#name shortcut type relop requestable consumable default urgency", *rows])
    monkeypatch.setattr(grid_engine, "run_program", lambda *_, **__: CompletedProcess((), 0, listed, ""))
    request = JobRequest(name="run", nodes=2, tasks_per_node=4, memory=memory, exclusive=exclusive)
    lines = GridEngine().directives(PROFILE, request, Path("/run"))
    return [line for line in lines if line.startswith("-l ")]


@pytest.mark.parametrize(
    ("rows", "memory", "line"),
    [
        (["mem_free mf MEMORY <= YES YES 0 0", "h_vmem h_vmem MEMORY <= YES NO 0 0"], "6G", "-l mem_free=1572864K"),
        (["mem_free mf MEMORY <= YES NO 0 0", "h_vmem h_vmem MEMORY <= YES YES 1G 0"], "6001M", "-l h_vmem=1536256K"),
        (["mem_free mf MEMORY <= YES NO 0 0", "h_vmem h_vmem MEMORY <= FORCED JOB 0 0"], "6", "-l h_vmem=6144K"),
        (["mem_free mf MEMORY <= YES NO 0 0", "h_vmem h_vmem MEMORY <= NO YES 0 0"], "6G", "-l mem_free=6291456K"),
    ],
)
def test_memory_of_a_host_by_what_the_site_counts(monkeypatch, rows, memory, line):
    assert asked(monkeypatch, *rows, memory=memory) == [line]


def test_whole_hosts_where_the_site_has_them(monkeypatch):
    assert asked(monkeypatch, "excl x BOOL EXCL YES YES 0 0", memory=None, exclusive=True) == ["-l excl=true"]
    # Altair's version lists whether it is affected by affinity, too.
    assert asked(monkeypatch, "excl x BOOL EXCL YES YES 0 0 NO 0", memory=None, exclusive=True) == ["-l excl=true"]
    with refused("HT-option-not-usable-here", option="node.exclusive"):
        asked(monkeypatch, "arch a RESTRING == YES NO NONE 0", exclusive=True)
