"""Arranges the hosts of a run: which they are, from the user or the scheduler, and their order, from the fabric.

A line of a hostfile means what Open MPI 4 and 5 and Hydra make of it, tried with Open MPI 5.0.11 and MPICH 5.0.2: a
host named again gets the new line's slots in addition, one where the line has no number. ``max-slots`` is passed over.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.common.cluster.host_list import MOST_HOSTS, HostSlots, add_slots, expand_hosts, expand_slots
from hpctrain.common.cluster.node_map import NodeMap
from hpctrain.common.cluster.programs import program_output
from hpctrain.common.errors import HpctrainError, counted
from hpctrain.common.files.regular import read_text
from hpctrain.common.recipes.requirements import require_ranks
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import HostOptions, Script
from hpctrain.control.planning.mesh_plan import mesh_work
from hpctrain.control.planning.place_hosts import KnownFabric, PlacedHosts, place_hosts
from hpctrain.control.topology.names import is_guid, managers
from hpctrain.control.topology.readers import slurm
from hpctrain.control.topology.records import SwitchGroup

FLAT = "unknown, taken to be flat"
_LISTED = "scontrol show topology"
_ALLOCATED = "SLURM_JOB_NODELIST"
# Slurm writes 2(x3),1 for 2, 2, 2 and 1.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_NUMBER = r"([1-9]\d{0,4})"
_LINE = re.compile(
    rf"([^\s@:^+][^\s@:]*)(?::{_NUMBER}|\s+slots\s*=\s*{_NUMBER}(?:\s+max[-_]slots\s*=\s*\d+)?)?", re.ASCII
)
_HINT = "a line is HOST, HOST slots=N [max-slots=M], or HOST:N; users and ports stand in ~/.ssh/config"
# Room for one line per rank of the largest machines.
_MOST_BYTES = 16 * 2**20


def read_hostfile(path: Path) -> HostSlots:
    """The hosts of a file with their slots, in its order.

    ``HOST slots=N [max-slots=M]`` is Open MPI's form (``max-slots`` is a limit for ranks beyond the slots, which no run
    here starts), ``HOST:N`` Hydra's. Lines of names alone are Slurm's form where names repeat: a line a rank. After
    ``#`` or ``//`` is a comment.

    Raises:
        HpctrainError: it cannot be read, is empty, has a line of another form, or says the slots of a host again;
            names file and line.
    """
    return parse_hostfile(read_text(path, "hostfile", _HINT, limit=_MOST_BYTES), str(path))


def read_pe_hostfile(path: Path) -> HostSlots:
    """The hosts of Grid Engine's ``PE_HOSTFILE`` with their slots: lines of host, slots, queue and processors.

    Raises:
        HpctrainError: as :func:`read_hostfile`.
    """
    lines = read_text(path, "hostfile of Grid Engine", "see sge_pe(5)", limit=_MOST_BYTES).splitlines()
    return parse_hostfile("\n".join(":".join(line.split()[:2]) for line in lines), str(path))


def parse_hostfile(text: str, name: str) -> HostSlots:
    """The hosts in a file's text; ``name`` names the file in messages. Raises as :func:`read_hostfile`."""
    hosts: HostSlots = {}
    alone = Counter[str]()
    for number, raw in enumerate(text.split("\n"), 1):
        content = re.split(r"#|//", raw, maxsplit=1)[0].strip()
        if content:
            _add_line(hosts, alone, content, f"{name}:{number}")
        if len(hosts) > MOST_HOSTS:
            raise _not_valid(name, f"more than {MOST_HOSTS} hosts")
    if not hosts:
        raise _not_valid(name, "no host in it")
    if max(alone.values(), default=1) > 1:
        # Slurm's form: a name on its own line counts for one rank.
        hosts |= {host: 1 for host in alone if hosts[host] is None}
    return hosts


def _not_valid(where: str, problem: str) -> HpctrainError:
    return HpctrainError("HT-hostfile-not-valid", "{where}: {problem}", _HINT, where=where, problem=problem)


def _add_line(hosts: HostSlots, alone: Counter[str], content: str, where: str) -> None:
    match = _LINE.fullmatch(content)
    if match is None:
        shown = content if len(content) <= 60 else f"{content[:60]}…"
        raise _not_valid(where, f"{shown!r} is not a host with its slots")
    names, numbered, keyed = match.groups()
    for host in expand_hosts(names, where):
        if keyed and host in hosts:
            raise _not_valid(where, f"slots= for {host}, which was named before: name it once, with all of its slots")
        slots = numbered or keyed
        add_slots(hosts, host, int(slots) if slots else None)
        if not slots:
            alone[host] += 1


# Files with the hosts of a job: of PBS and LSF with a line for each slot, of Grid Engine with a line for each host.
# Sources: pbs_resources(7B), bsub's environment variables in IBM's documentation of LSF, sge_pe(5).
_JOB_FILES = {"PBS_NODEFILE": read_hostfile, "LSB_DJOB_HOSTFILE": read_hostfile, "PE_HOSTFILE": read_pe_hostfile}


def arrange(
    options: HostOptions,
    this_host: str,
    ranks: int | None,
    environment: Mapping[str, str] = os.environ,
    *,
    work: Recipe | Script | None = None,
    whole_fabric: bool = False,
) -> tuple[PlacedHosts, tuple[str, ...]]:
    """The hosts in the plan's order with their slots, and warnings.

    Args:
        options: from the command line. If they name no hosts, the hosts are those of the job of Slurm, PBS, LSF or Grid
            Engine in which this process runs.
        this_host: the only host where nothing names hosts.
        ranks: the world size; by default the sum of the slots, else one per GPU, or one per host where no node map
            shows the GPUs. Where only some hosts have slots, the others have one.
        work: what the ranks are to run; its mesh influences the order.
        whole_fabric: where nothing names the run's hosts, take all hosts of a given fabric instead of refusing.

    Raises:
        HpctrainError: files or lists that cannot be read, hosts that are not there, or ranks that do not fit, also
            the mesh.
    """
    named, source = _named_hosts(options, environment)
    given = given_fabric(options)
    if given and not named and not whole_fabric:
        raise HpctrainError(
            "HT-hosts-not-named",
            "--fabric {fabric} has {hosts} hosts, and nothing says which of them are yours",
            "name them with --hosts, or start inside a Slurm allocation",
            fabric=options.fabric,
            hosts=len(given.fabric.hosts),
        )
    hosts_slots, warnings = _hosts(options, named, source, given, this_host)
    names = tuple(hosts_slots)
    node_map = _node_map(options)
    # One host needs no fabric.
    known = given or (known_fabric(names) if len(names) > 1 else None)
    slots = _slots(hosts_slots, ranks, environment if _is_allocation(options, environment) and not node_map else {})
    ranks = _default_ranks(names, slots, node_map) if ranks is None else ranks
    require_ranks(ranks)
    hosts = place_hosts(
        slots or dict.fromkeys(names),
        ranks,
        known,
        node_map=node_map,
        interface=options.interface,
        work=mesh_work(work, ranks) if work else None,
    )
    warnings += known.fabric.warnings if known else ()
    warnings += node_map.warnings if node_map else ()
    if hosts.traffic and hosts.traffic.warning:
        warnings += (hosts.traffic.warning,)
    if known and known.source == FLAT and len(names) > 1:
        warnings += ("no fabric is known, so the hosts stay in the order given: --fabric FILE names one",)
    return hosts, warnings


def are_given(options: HostOptions, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a list, a hostfile or the scheduler's job gives the hosts and their slots."""
    named_by_job = any(environment.get(name) for name in (_ALLOCATED, *_JOB_FILES))
    return options.hosts is not None or options.hostfile is not None or named_by_job


def _default_ranks(names: Sequence[str], slots: Mapping[str, int] | None, node_map: NodeMap | None) -> int:
    """The number of ranks where the user gives none."""
    if slots:
        return sum(slots.values())
    return len(names) * (len(node_map.gpus) if node_map and node_map.gpus else 1)


def _node_map(options: HostOptions) -> NodeMap | None:
    if options.node is None:
        return None
    # Imported here because only --node needs the readers of these files.
    from hpctrain.control.topology.node_file import node_map_of

    return node_map_of(options.node)


def _is_allocation(options: HostOptions, environment: Mapping[str, str]) -> bool:
    return options.hosts is None and options.hostfile is None and bool(environment.get(_ALLOCATED))


def _named_hosts(options: HostOptions, environment: Mapping[str, str]) -> tuple[HostSlots, str]:
    """The hosts that the options or the scheduler's job name, with their slots, and what names them."""
    if options.hosts is not None and options.hostfile is not None:
        raise HpctrainError(
            "HT-options-exclude-each-other", "--hosts and --hostfile both say which hosts", "give one of them"
        )
    if options.hosts is not None:
        return expand_slots(options.hosts, "--hosts"), "--hosts"
    if options.hostfile is not None:
        return read_hostfile(options.hostfile), str(options.hostfile)
    if allocated := environment.get(_ALLOCATED):
        return dict.fromkeys(expand_hosts(allocated, _ALLOCATED)), "the allocation"
    for name, read in _JOB_FILES.items():
        if path := environment.get(name):
            return read(Path(path)), f"the job ({name})"
    return {}, ""


def _hosts(
    options: HostOptions, named: HostSlots, source: str, given: KnownFabric | None, this_host: str
) -> tuple[HostSlots, tuple[str, ...]]:
    """The run's hosts in the order in which they are named, with their slots, and warnings."""
    warnings: tuple[str, ...] = ()
    if named:
        hosts, where = named, source
    elif given:
        fabric, where = given
        idle = managers(fabric.hosts)
        hosts = dict.fromkeys(host for host in fabric.hosts if not is_guid(host) and host not in idle)
        if nameless := [host for host in fabric.hosts if is_guid(host)]:
            warnings = (counted(f"hosts of {where} without a name, which no run can reach, left out", nameless),)
        if not hosts:
            raise HpctrainError(
                "HT-hosts-not-named",
                "{where}: none of its {count} hosts has a name",
                "name yours with --hosts",
                where=where,
                count=len(nameless),
            )
    else:
        hosts, where = {this_host: None}, "this machine"
    if options.nodes is not None and not 1 <= options.nodes <= len(hosts):
        raise HpctrainError(
            "HT-hosts-too-few",
            "--nodes {nodes}: {where} has {count} host{plural}",
            "name more with --hosts, or give their --fabric",
            nodes=options.nodes,
            where=where,
            count=len(hosts),
            plural="" if len(hosts) == 1 else "s",
        )
    return dict(list(hosts.items())[: options.nodes]), warnings


def _slots(hosts: HostSlots, ranks: int | None, allocation: Mapping[str, str]) -> dict[str, int] | None:
    """The slots of each host, by the user or else by Slurm's tasks; None where neither gives any.

    Args:
        allocation: Slurm's variables where the hosts are those of its job, else empty.
    """
    if any(hosts.values()):
        # Hosts without slots beside others have one.
        return {name: slots or 1 for name, slots in hosts.items()}
    tasks = _tasks(allocation)[: len(hosts)]
    # Slurm counts the tasks of all hosts of the job, and the user may ask for another number of ranks.
    if len(tasks) < len(hosts) or ranks not in (None, sum(tasks)):
        return None
    return dict(zip(hosts, tasks, strict=True))


def _tasks(allocation: Mapping[str, str]) -> list[int]:
    """The tasks of each host of the job.

    Empty where the job did not ask for tasks, since Slurm then counts processors, and in a step, whose variables
    describe the step.
    """
    asked = "SLURM_NTASKS" in allocation or "SLURM_NTASKS_PER_NODE" in allocation
    if not asked or "SLURM_STEP_ID" in allocation:
        return []
    groups = _TASKS.findall(allocation.get("SLURM_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]


def find_fabric(options: HostOptions, hosts: Sequence[str]) -> KnownFabric:
    """The fabric of :func:`given_fabric` or :func:`known_fabric`."""
    return given_fabric(options) or known_fabric(hosts)


def given_fabric(options: HostOptions) -> KnownFabric | None:
    """The fabric of the file that ``options`` name, with its forwarding tables; None without a file.

    Raises:
        HpctrainError: the file cannot be read, or there are tables but no file.
    """
    if options.fabric is not None:
        # Imported here because it loads NumPy.
        from hpctrain.control.topology.build import read_fabric

        return KnownFabric(read_fabric(options.fabric, options.routes), str(options.fabric))
    if options.routes is not None:
        raise HpctrainError(
            "HT-option-needs-another",
            "--routes {routes}: forwarding tables alone do not say what is cabled to what",
            "name the output of ibnetdiscover with --fabric",
            routes=options.routes,
        )
    return None


def known_fabric(hosts: Sequence[str]) -> KnownFabric:
    """The fabric that can be known without a file, and where from: ``scontrol show topology``, else :data:`FLAT`, one
    switch for all hosts.

    What scontrol prints is skipped with a warning where it cannot be read or lacks one of the run's hosts, because the
    user did not ask for it.
    """
    # Imported here because it loads NumPy, which a run on one host does not need.
    from hpctrain.control.topology.build import build_fabric

    flat = build_fabric([SwitchGroup(name="flat", hosts=tuple(hosts), where="the hosts of the run")])
    # One host needs no fabric, and scontrol takes time to answer.
    tree = program_output(*_LISTED.split()) if len(hosts) > 1 else ""
    # Slurm without a topology plugin prints no switches.
    if "Name=" not in tree:
        return KnownFabric(flat, FLAT)
    try:
        fabric = build_fabric(slurm.read(tree, _LISTED))
    except HpctrainError as error:
        return KnownFabric(replace(flat, warnings=(f"{_LISTED} is not used: {error.message}", *flat.warnings)), FLAT)
    if unknown := [host for host in hosts if host not in fabric.hosts]:
        warning = counted(f"{_LISTED} is not used: hosts that it lacks", unknown)
        return KnownFabric(replace(flat, warnings=(warning, *flat.warnings)), FLAT)
    return KnownFabric(fabric, _LISTED)
