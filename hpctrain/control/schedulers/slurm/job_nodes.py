"""The nodes of a job: they are checked before the ranks start, those that failed are left out of the next jobs, and
what was used of them is said.

That a node failed is an event of the run. It counts for a day, and at most a tenth of the partition is left out: a
fault that follows the run from node to node must not take the cluster away from it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hpctrain.common.cluster.host_list import expand_hosts
from hpctrain.common.cluster.programs import program_output, run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import temporary_folder
from hpctrain.common.files.regular import read_regular
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, EventWriter
from hpctrain.common.run.events.kinds import ExcludedEvent, FaultEvent, StartEvent
from hpctrain.common.run.plan import Container
from hpctrain.common.run.records import RankRecord, read_records
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.slurm.queue import job_states

_ALLOCATED = "SLURM_JOB_NODELIST"
_REMEMBERED_SECONDS = 86400.0
_SHARE = 10
# Faults of a host, whatever it trains. An exception of a script, or a number that is not finite, is none.
_OF_HOSTS = ("HT-host-lost", "HT-host-no-daemon", "HT-host-gpu-broken")
# The first start of Python from a shared file system can be slow.
_CHECK_SECONDS = 180.0
# How the names of checks begin of what is not the node's own, and slow while all nodes try it at once.
_SHARED = ("free disk", "write to run directory", "home folder", "import of torch", "Horovod")
# Options of sbatch that name the nodes, of which none can be left out.
_NAME_NODES = ("nodelist", "nodefile", "reservation")
# Of a node's answer, which has some thousands.
_MOST_BYTES = 2**20
# For what the next run may need beside what this one has used.
_MARGIN = 1.25
# Of the processes that start the ranks, and the batch script's.
_LAUNCHER_BYTES = 500 * 10**6
# A process of a rank that has more is a worker, whose memory is not the rank's.
_WORKER_BYTES = 100 * 2**20


def check_nodes(run: RunDirectory, say: Callable[[str], None]) -> dict[str, str]:
    """Let ``hpctrain doctor`` check each node of this job; says what fails and is no single node's fault.

    Returns:
        Which checks fail on each node by its own fault, in words; empty where none does.
    """
    nodes = expand_hosts(os.environ[_ALLOCATED], _ALLOCATED)
    with temporary_folder(".hpctrain-check-", run.path) as folder:
        # Slurm numbers the nodes in the order of the list.
        once = (f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--kill-on-bad-exit=0")
        answers = (f"--output={folder}/%n", "--error=none")
        # Outside of a job doctor checks its own host alone.
        doctor = ("env", "-u", _ALLOCATED, "hpctrain", "doctor", "--json", f"--run-dir={run.path}")
        # A node that does not answer has written nothing.
        with contextlib.suppress(HpctrainError):
            run_program("srun", *once, *answers, *doctor, seconds=_CHECK_SECONDS)
        return faults_of_nodes({node: Path(folder, str(number)) for number, node in enumerate(nodes)}, say)


def faults_of_nodes(answers: Mapping[str, Path], say: Callable[[str], None]) -> dict[str, str]:
    """What the nodes' answers say against them, see :func:`check_nodes`.

    Args:
        answers: what ``hpctrain doctor --json`` printed on each node.
    """
    failed = {node: _failed_checks(answer) for node, answer in answers.items()}
    counts = Counter(name for faults in failed.values() for name in faults)
    # What fails on all nodes is the cluster's, or the limit is; other nodes would fail too.
    shared = {name for name, count in counts.items() if name.startswith(_SHARED) or 1 < count == len(answers)}
    for name in sorted(shared):
        fault = next(faults[name] for faults in failed.values() if name in faults)
        say(f"hpctrain: {fault} (on {counts[name]} of {len(answers)} nodes): no node is left out for that")
    return {
        node: "; ".join(fault for name, fault in faults.items() if name not in shared)
        for node, faults in failed.items()
    }


def _failed_checks(answer: Path) -> dict[str, str]:
    """What failed on a node, in words, by the check's name."""
    try:
        text = read_regular(answer, _MOST_BYTES, links=False).decode()
        # Prologs and modules print around it.
        checks = json.JSONDecoder().raw_decode(text, text.index("{"))[0]["checks"]
    except (OSError, ValueError):
        return {"hpctrain doctor": "hpctrain doctor gave no answer there"}
    failed = [check for check in checks if check["status"] == "failed"]
    return {check["name"]: f"{check['name']}: {check['found']}, wanted {check['wanted']}" for check in failed}


def use_only(nodes: Sequence[str]) -> None:
    """Let what this process starts take these nodes for all of its job's."""
    os.environ[_ALLOCATED] = ",".join(nodes)


def record_failed(run: RunDirectory, faults: dict[str, str]) -> None:
    """Record why nodes are left out of the run's next jobs."""
    with EventWriter(run.events) as events:
        for node, fault in faults.items():
            events.emit(ExcludedEvent(host=node, message=fault))


def nodes_to_exclude(
    run: RunDirectory, request: JobRequest, needed: int, say: Callable[[str], None]
) -> tuple[str, ...] | None:
    """The nodes that the next job is to leave out, those that failed last first; records and says what is new.

    Args:
        request: what that job asks for.
        needed: how many nodes it asks for.

    Returns:
        None where no node has ever failed.
    """
    failed: dict[str, ExcludedEvent | FaultEvent] = {}
    for event in EventsFile(run.events).of_kinds(ExcludedEvent, FaultEvent):
        if isinstance(event, ExcludedEvent) or (isinstance(event, FaultEvent) and event.code in _OF_HOSTS):
            # A fault may name several hosts, or none; and hosts with their domain, which Slurm's nodes mostly lack.
            failed |= dict.fromkeys(re.findall(r"([^\s,.]+)[^\s,]*", event.host or ""), event)
    if not failed:
        return None
    known = _nodes_for(request)
    # Rounded up, so that a small cluster can do without one.
    most = max(0, min(-(-len(known) // _SHARE), len(known) - needed))
    since = time.time() - _REMEMBERED_SECONDS
    recent = [node for node, event in failed.items() if event.time > since and node in known]
    recent.sort(key=lambda node: failed[node].time, reverse=True)
    for number, node in enumerate(recent):
        how = "leaves out" if number < most else f"may leave out {most} of {len(known)} nodes, so that it keeps"
        say(f"hpctrain: the next job {how} {node}: {failed[node].message}")
    nodes = tuple(recent[:most])
    record_failed(run, {node: failed[node].message for node in nodes if isinstance(failed[node], FaultEvent)})
    return nodes


def _nodes_for(request: JobRequest) -> set[str]:
    """The nodes of the partition that can run a job; none where it is not known how few these are.

    A job that leaves out too many of them would wait for ever.
    """
    # Slurm accepts abbreviated option names.
    if any(name.startswith(option) for option in request.sbatch for name in _NAME_NODES):
        return set()
    partition = f"--partition={os.environ['SLURM_JOB_PARTITION']}"
    rows = program_output("sinfo", "--noheader", "--Node", "--format=%N %f %G", partition).splitlines()
    gpu = f"gpu:{request.gpu_type}" if request.gpu_type else "gpu"
    nodes = set()
    for node, features, resources in map(str.split, rows):
        # A constraint of several features is none of any node's.
        fits = request.constraint is None or request.constraint in features.split(",")
        if fits and (not request.gpus_per_node or re.search(rf"\b{re.escape(gpu)}(?![\w-])", resources)):
            nodes.add(node)
    return nodes


def look_at_image(container: Container) -> None:
    """Fetch an image that is an address once, instead of by every rank.

    Raises:
        HpctrainError: it cannot be fetched or run.
    """
    if container.runtime == "pyxis" or container.image.startswith("/"):
        return
    # Ranks that find it in the cache need not fetch and convert it all at a time.
    command = ["apptainer", "exec", container.image, "true"]
    if shutil.which("apptainer") is None or subprocess.run(command, check=False).returncode:
        raise HpctrainError(
            "HT-job-image-unusable", "the image {image}: apptainer cannot run it", image=container.image
        )


def used_of_asked(run: RunDirectory, end_seconds: int) -> str:
    """A line for a run that this job has brought to its end; empty where nothing is known.

    Args:
        end_seconds: how long before its limit a job is told of it.
    """
    try:
        (job,) = job_states([os.environ["SLURM_JOB_ID"]])
        begun_here = len(EventsFile(run.events).few(StartEvent)) == 1
    except (HpctrainError, ValueError):
        return ""
    cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "0"))
    per_node, per_cpu = (int(os.environ.get(f"SLURM_MEM_PER_{name}", "0")) for name in ("NODE", "CPU"))
    records = read_records(run).values()
    used, advice = [], []
    if job.limit_seconds:
        used.append(f"{_minutes(job.seconds)} of {_minutes(job.limit_seconds)} min")
        if begun_here:
            advice.append(f"--time {_minutes(job.seconds * _MARGIN + end_seconds)}")
    if memory := most_memory(records):
        host, most = memory
        asked = (per_node or per_cpu * cpus) * 2**20
        used.append(f"{_gigabytes(most)}{f' of {_gigabytes(asked)}' if asked else ''} GB in the ranks on {host}")
        if asked and not any(record.worker_bytes > _WORKER_BYTES for record in records):
            advice.append(f"--sbatch mem={math.ceil((most * _MARGIN + _LAUNCHER_BYTES) / 2**30)}G")
    if share := busy(records, cpus * int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))):
        used.append(f"{share:.0%} of the CPUs' time")
    if not used:
        return ""
    again = f"; next time: hpctrain submit … {' '.join(advice)}" if advice else ""
    return f"job {job.id} used {', '.join(used)}{again}"


def most_memory(records: Iterable[RankRecord]) -> tuple[str, int] | None:
    """The host whose ranks together had the most memory by their own peaks, and how much in bytes."""
    peaks: Counter[str] = Counter()
    for record in records:
        peaks[record.host] += record.peak_bytes
    most = peaks.most_common(1)
    return most[0] if most and most[0][1] else None


def busy(records: Iterable[RankRecord], cpus: int) -> float | None:
    """The part of the CPUs' time that ranks and their workers used, while the ranks were there."""
    done = [record for record in records if record.ended]
    seconds = max((record.ended - record.started for record in done), default=0.0)
    return sum(record.cpu_seconds for record in done) / (seconds * cpus) if seconds > 0 and cpus else None


def _minutes(seconds: float) -> int:
    return math.ceil(seconds / 60)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"
