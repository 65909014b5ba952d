"""Readers of texts: recipes, profiles, fabrics, events, and what Slurm and a run's own files say."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader.

    Attributes:
        read: of the bytes and a folder of its own for files; what it returns does not matter.
        seeds: makes what it reads without a fault, and what is nearly so.
    """

    read: Callable[[bytes, Path], object]
    seeds: Callable[[], Iterable[bytes]]


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _recipe(content: bytes, folder: Path) -> None:
    from hpctrain.common.recipes.entries import load_entry, variant_names
    from hpctrain.common.recipes.load import override_recipe

    path = str(write(folder, "recipe.yaml", content))
    names = variant_names(path)
    entry = load_entry(f"{path}@{names[-1]}" if names else path)
    entry.at(2)
    override_recipe(entry, ["seed=2", "data.name=digits"])


def _recipes() -> Iterable[bytes]:
    import hpctrain.common.recipes

    return [path.read_bytes() for path in sorted(Path(hpctrain.common.recipes.__path__[0]).glob("*.yaml"))]


def _profile(content: bytes, folder: Path) -> None:
    from hpctrain.control.schedulers.profile import load_profile

    load_profile(str(write(folder, "profile.yaml", content)))


def _profiles() -> Iterable[bytes]:
    from hpctrain.control.schedulers.profile import slurm_folder

    return [path.read_bytes() for path in sorted((slurm_folder() / "clusters").glob("*.yaml"))]


def _hosts(content: bytes, folder: Path) -> None:
    from hpctrain.common.cluster.host_list import expand_slots, fold_hosts
    from hpctrain.control.hosts.arrange import read_hostfile

    with contextlib.suppress(HpctrainError):
        # ClusterShell takes seconds for tens of thousands of names with two numbers each.
        fold_hosts(list(expand_slots(_text(content), "--hosts"))[:1000])
    read_hostfile(write(folder, "hostfile", content))


def _fabric(content: bytes, folder: Path) -> None:
    from hpctrain.control.topology.build import read_fabric

    read_fabric(write(folder, "fabric.txt", content))


def _fabrics() -> Iterable[bytes]:
    from support.topology.infiniband_texts import IBNETDISCOVER, IBNETDISCOVER_PORTS

    return [text.encode() for text in (IBNETDISCOVER, IBNETDISCOVER_PORTS)]


_SLURM_TREES = (
    b"SwitchName=core Switches=s[1-2]   # the top\nswitchname=s1 nodes=n[1-2] LINKSPEED=100\n\n"
    b'SwitchName = "s2" \\\n    Nodes=n3,n4\n',
    b"BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n",
    b"core.s1.n1 switch.switch.node\ncore.s2.n2 switch.switch.node\n",
)


def _routes(content: bytes, folder: Path) -> None:
    from hpctrain.control.topology.build import read_fabric
    from support.topology.infiniband_texts import IBNETDISCOVER

    read_fabric(write(folder, "fabric.txt", IBNETDISCOVER.encode()), write(folder, "routes.txt", content))


def _tables() -> Iterable[bytes]:
    from support.topology.infiniband_texts import DUMP_LFTS

    return [DUMP_LFTS.encode()]


def _node(content: bytes, folder: Path) -> None:
    from hpctrain.common.cluster.node_map import slots
    from hpctrain.control.topology.node_file import read_node_map

    slots(read_node_map(write(folder, "node.txt", content)), 2)


def _nodes() -> Iterable[bytes]:
    from support.topology.node_texts import GPUS_ONLY, NCCL_DUMP, NO_AFFINITY, WITH_ADAPTERS, hwloc_export

    texts = (GPUS_ONLY, NCCL_DUMP, NO_AFFINITY, WITH_ADAPTERS, hwloc_export("2.0"), hwloc_export("3.0"))
    return [text.encode() for text in texts]


@functools.cache
def _plan() -> Any:
    from support.report.written_runs import recipe_plan

    return recipe_plan()


def _events(content: bytes, folder: Path) -> None:
    from hpctrain.common.run.directory import RunDirectory
    from hpctrain.common.run.events import EventWriter, read_events
    from hpctrain.report.record import Record, event_line
    from hpctrain.report.status import KnownRun
    from hpctrain.report.summary import summarise

    directory, plan = RunDirectory(folder), _plan()
    events = write(folder, "events.jsonl", content)
    with contextlib.suppress(HpctrainError):
        for event in read_events(events):
            event_line(event)
    known = KnownRun(
        directory=directory,
        plan=plan,
        record=Record(directory),
        jobs=(),
        job_ids=(),
        summary=None,
        alive=None,
    )
    known.status(2e9)
    json.dumps(summarise(directory, plan, "done"))
    with EventWriter(None) as writer:
        writer.take_over(events)


# An event of each kind that a calm run has none of.
RARE: tuple[dict[str, Any], ...] = (
    {"event": "damaged", "path": "step-00000003", "fault": "cut short", "kept_as": "damaged-step-00000003"},
    {"event": "changed", "differences": {"optimizer.learning_rate": [0.1, 0.2]}},
    {"event": "log", "iteration": 3, "values": {"loss": 0.3, "energy": 0.5}},
    {"event": "non_finite", "iteration": 5, "epoch": 1, "rule": "skip", "ranks": [0, 1]},
    {"event": "energy", "iteration": 9, "hosts": {"n1": {"began": 1.7e9, "seconds": 9.0, "joules": {"gpu": 1.0}}}},
    {"event": "stall", "rank": 1, "host": "n2", "waiting_for": "a mean", "seconds": 20.0},
    {"event": "fault", "rank": 1, "host": "n2", "message": "rank 1 was killed", "code": "HT-rank-killed"},
    {"event": "fault", "rank": 1, "host": "n2", "message": "rank 1 was killed", "iteration": 7, "recovery_seconds": 1.0}
    | {"samples_affected": 8, "ranks": 1},
    {"event": "stopped", "iteration": 20, "reason": "SIGTERM"},
    {"event": "of another version", "what": [1, 2]},
)


def _runs() -> Iterable[bytes]:
    from support.report.written_runs import run_events

    again = {"event": "start", "attempt": 2, "iteration": 4, "job": "12", "launcher": "mpirun", "hosts": ["n1"]}
    events = run_events()
    texts = (events[:8], [*events[:6], *({"time": 1_700_000_100.0, **event} for event in (again, *RARE))], events[-3:])
    return [b"".join(json.dumps(event).encode() + b"\n" for event in text) for text in texts]


def _run_files(content: bytes, folder: Path) -> None:
    """The content as a plan, a summary, a submission and the record of a rank."""
    from hpctrain.common.run.directory import RunDirectory, read_model
    from hpctrain.common.run.plan import Plan
    from hpctrain.common.run.records import read_records
    from hpctrain.control.schedulers.run_jobs import summary_status
    from hpctrain.control.schedulers.submission import Submission
    from hpctrain.report.page import read_summary, settings

    clear(folder)
    directory = RunDirectory(folder)
    directory.ranks.mkdir()
    for path in (directory.plan, directory.summary, directory.submission, directory.rank(0)):
        path.write_bytes(content)

    def show_plan() -> None:
        plan = read_model(directory.plan, Plan)
        settings(plan)
        read_summary(directory)

    for read in (
        show_plan,
        lambda: summary_status(directory),
        lambda: read_model(directory.submission, Submission),
        lambda: read_records(directory),
    ):
        with contextlib.suppress(HpctrainError):
            read()


def _run_texts() -> Iterable[bytes]:
    from hpctrain.common.run.records import RankRecord
    from hpctrain.control.schedulers.submission import Submission
    from support.report.written_runs import recipe_plan, script_plan

    summary = {"status": "done", "epochs": 3, "steps": 12, "samples_per_s": 1.5, "communication_share": 0.1}
    models = (
        recipe_plan(),
        script_plan(),
        RankRecord(rank=0, host="n1", pid=4, started=1.0, status="failed", exit_code=1),
        Submission(cluster="generic", jobs=("1",)),
    )
    texts = [model.model_dump_json().encode() for model in models]
    return [*texts, json.dumps({**summary, "metrics": {"test_accuracy": 0.9}}).encode(), b'{"seeds": [1, 2, 3]}']


def _slurm(content: bytes, _: Path) -> None:
    """What Slurm's programs print; three answers, one after the other, with form feeds between them."""
    from hpctrain.control.schedulers.slurm.discover import profile_from
    from hpctrain.control.schedulers.slurm.queue import read_jobs
    from hpctrain.report.status import _waits_for

    text = _text(content)
    for program in ("squeue", "sacct"):
        with contextlib.suppress(HpctrainError):
            for job in read_jobs(program, text):
                _waits_for(job)
    config, partitions, nodes = (text.split("\f") + [""] * 3)[:3]
    profile_from(config, partitions, nodes, partition=None, today=date(2026, 11, 21))


def _slurm_texts() -> Iterable[bytes]:
    from support.schedulers.discover_texts import A100, CONFIG, GPU
    from support.schedulers.slurm_programs import row

    sacct = ["7", "7", "CANCELLED by 1000", "None", "1795249391", "00:10:00", "01:00:00", "n1", "0:15", "/runs", "\n"]
    return [
        "\f".join((CONFIG, GPU, A100)).encode(),
        row("12_[4-9%2]", "RUNNING", "/runs", start="1795249391", used="1-02:03:04", nodes="n[1-2]").encode(),
        "\x1f".join(sacct).encode(),
    ]


READERS: Mapping[str, Reader] = {
    "recipe": Reader(read=_recipe, seeds=_recipes),
    "profile": Reader(read=_profile, seeds=_profiles),
    "hosts": Reader(
        read=_hosts, seeds=lambda: [b"gpu[001-032,040]:8,login1", b"# ours\nn1 slots=4 max_slots=8\nn2:4\n", b"a\na\nb"]
    ),
    "fabric": Reader(read=_fabric, seeds=_fabrics),
    "slurm_topology": Reader(read=_fabric, seeds=lambda: _SLURM_TREES),
    "routes": Reader(read=_routes, seeds=_tables),
    "node": Reader(read=_node, seeds=_nodes),
    "events": Reader(read=_events, seeds=_runs),
    "run_files": Reader(read=_run_files, seeds=_run_texts),
    "slurm": Reader(read=_slurm, seeds=_slurm_texts),
}
