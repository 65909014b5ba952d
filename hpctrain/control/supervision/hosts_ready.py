"""Checks, before ranks start on other hosts, that they can: each fault names its hosts and the remedy."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import hpctrain
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.interfaces import read_interfaces
from hpctrain.common.cluster.launcher import in_pod
from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import nearest_existing, temporary_folder
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.hosts.networks import CHOICES, Networks, choose_networks, require_interface
from hpctrain.control.launchers.command import Launcher, Torchrun
from hpctrain.control.launchers.launcher_choice import in_allocation
from hpctrain.control.supervision.host_questions import (
    Answer,
    addresses_of,
    ask_hosts,
    is_here,
    other_agent,
    own_addresses,
)

_PORTS = re.compile(r"(?i)(static|dynamic)_(ipv[46]_)?ports|port_range|port_min")

# Nodes may have to be added to the cluster first, and each fetches an image of several gigabytes.
PODS_SECONDS = 1800.0
_POLL_SECONDS = 0.5
# In jobs of PBS, LSF and Grid Engine the scheduler's own program reaches the hosts, and ssh may be forbidden.
_OTHER_SCHEDULERS = ("PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
# What ssh prints before its reason: its own name and that of the host.
_TO_HOST = re.compile(r"^(ssh: )?(connect to host \S+ |\S+@\S+: )?")


def await_names(
    names: Sequence[str], *, notice: Callable[[str], None], seconds: float = PODS_SECONDS, poll: float = _POLL_SECONDS
) -> None:
    """Wait until every name of a pod has an address, which its headless service gives it when its containers run.

    Raises:
        HpctrainError: some have none in time; with the exit code of a resumable run, as they may still appear.
    """
    deadline, told = time.monotonic() + seconds, False
    while missing := [name for name, addresses in addresses_of(names).items() if not addresses]:
        if time.monotonic() > deadline:
            raise HpctrainError(
                "HT-host-no-address",
                "{hosts} had no address within {seconds:g} s",
                "`kubectl get pods` shows which pods are not running, and `kubectl describe pod NAME` why",
                exit_code=RESUMABLE,
                hosts=fold_hosts(missing),
                seconds=seconds,
            )
        if not told:
            notice(f"waiting for {fold_hosts(missing)}, for {seconds:g} s at most")
            told = True
        time.sleep(poll)


def ready_hosts(
    plan: Plan,
    launcher: Launcher | None,
    folder: Path,
    *,
    notice: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> Plan:
    """The plan with the networks that its hosts share, after a check that ranks can start on all of them.

    Hosts on which srun, or a program of the user's own, starts the ranks are not asked. Pods are waited for.

    Args:
        launcher: what starts its ranks; None where this machine does.
        folder: of the run, or of what is written instead; need not be there yet.
        notice: gets what the user has to know.

    Raises:
        HpctrainError: names the hosts that do not answer, do not see the folder or the script, lack the interpreter or
            this hpctrain, still have ranks of the run, or have no network for the ranks, with the remedy.
    """
    if isinstance(launcher, Torchrun) and in_pod(environment):
        await_names([host.host for host in plan.hosts], notice=notice)
    answers = _answers(plan, launcher, folder, environment)
    if not answers:
        return plan
    for warning in _differences(answers):
        notice(f"warning: {warning}")
    networks = _networks(plan, answers, environment)
    if networks.note:
        notice(networks.note)
    return plan.model_copy(update={"environment": {**plan.environment, **networks.variables}})


def _answers(plan: Plan, launcher: Launcher | None, folder: Path, environment: Mapping[str, str]) -> dict[str, Answer]:
    """The answers of a plan's hosts, on all of which ranks can start; empty where they cannot or need not be asked."""
    if not _reached_by_ssh(plan, launcher, environment):
        return {}
    addresses = addresses_of([host.host for host in plan.hosts])
    interfaces = list(read_interfaces())
    own = {address for one in interfaces for address in one.addresses}
    here = {host: is_here(host, found, own) for host, found in addresses.items()}
    if all(here.values()) or shutil.which("ssh") is None:
        return {}
    elsewhere = "name a folder that all hosts share with --run-dir"
    with temporary_folder(".hpctrain-hosts-", nearest_existing(folder), elsewhere) as probe:
        paths = [Path(probe), *([plan.script.file.absolute()] if plan.script and not plan.start.container else [])]
        ways = () if _has_ports(plan, environment) else own_addresses(interfaces)
        answers = ask_hosts(plan, here, folder, paths, ways)
    faults = {host: _fault(plan, host, answer, folder, paths) for host, answer in answers.items()}
    _require_no_fault({host: fault for host, fault in faults.items() if fault})
    return answers


def _reached_by_ssh(plan: Plan, launcher: Launcher | None, environment: Mapping[str, str]) -> bool:
    """Whether the hosts of a plan are reached by ssh, and can be asked."""
    if not isinstance(launcher, MpiInstallation) or in_allocation(environment) or other_agent(plan, environment):
        return False
    return not any(environment.get(name) for name in _OTHER_SCHEDULERS)


class _Fault(NamedTuple):
    """What keeps ranks from starting on a host, as what is said of the host, and the remedy."""

    said: str
    remedy: str


def _require_no_fault(faults: Mapping[str, _Fault]) -> None:
    # Hosts with the same fault are named together.
    alike: dict[_Fault, list[str]] = {}
    for host, fault in faults.items():
        alike.setdefault(fault, []).append(host)
    if alike:
        raise HpctrainError(
            "HT-hosts-unfit",
            "{lines}",
            "\n  ".join(dict.fromkeys(fault.remedy for fault in alike)),
            exit_code=1,
            lines="\n".join(f"{fold_hosts(hosts)} {fault.said}" for fault, hosts in alike.items()),
        )


def _fault(plan: Plan, host: str, answer: Answer, folder: Path, paths: Sequence[Path]) -> _Fault | None:
    """The first thing that keeps ranks from starting on a host."""
    if not answer.reached:
        # Without the host's name, so that hosts with the same fault are reported together.
        said = _TO_HOST.sub("", answer.error) or "its shell gave no answer"
        return _Fault(
            f"does not answer ssh: {said}",
            "`ssh HOST true` has to work without a prompt: is the name right, the host up, its key accepted, and no "
            "firewall in between? Otherwise leave it out of --hosts",
        )
    if answer.missing:
        there = nearest_existing(folder) if str(paths[0]) in answer.missing else answer.missing[0]
        return _Fault(
            f"does not see {there}, which is on this host alone",
            "start from a folder that all hosts share, which also has the script; --run-dir names another for the run",
        )
    program = "apptainer" if plan.start.container else plan.start.python or sys.executable
    if not answer.program:
        return _Fault(
            f"has no program {program}, which each rank runs in",
            "install it there too, in the same place; --python PROGRAM names another interpreter",
        )
    if plan.start.container is None and answer.version != hpctrain.__version__:
        reason = f"it is {answer.version} there" if answer.version else answer.error or "no reason given"
        return _Fault(
            f"has no hpctrain {hpctrain.__version__} in {program}: {reason}",
            "start from one environment on a file system that all hosts share, or from a container",
        )
    if answer.cut_off:
        return _Fault(
            f"cannot connect to {socket.gethostname()}, as mpirun needs it: a firewall lets only ssh through",
            "open all ports between the hosts; to limit mpirun to a range of them, set "
            "PRTE_MCA_oob_tcp_dynamic_ipv4_ports and OMPI_MCA_btl_tcp_port_min_v4",
        )
    if answer.busy:
        pids = " ".join(map(str, answer.busy))
        return _Fault(
            f"still has ranks of an earlier attempt of this run: process {pids}",
            f"they end by themselves once they miss the others; to end them at once: ssh {host} kill -KILL {pids}",
        )
    return None


def _has_ports(plan: Plan, environment: Mapping[str, str]) -> bool:
    """Whether the user limits mpirun to certain ports, which a firewall may let through."""
    return any(map(_PORTS.search, (*environment, *plan.start.environment, *plan.start.arguments)))


def _differences(answers: Mapping[str, Answer]) -> Iterator[str]:
    """Warnings about packages that affect the results and differ between the hosts."""
    for package in dict.fromkeys(package for answer in answers.values() for package in answer.versions):
        hosts: dict[str, list[str]] = {}
        for host, answer in answers.items():
            hosts.setdefault(answer.versions.get(package, "missing"), []).append(host)
        if len(hosts) > 1:
            versions = ", ".join(f"{version} on {fold_hosts(names)}" for version, names in hosts.items())
            yield f"{package} is not the same everywhere: {versions}"


def _networks(plan: Plan, answers: Mapping[str, Answer], environment: Mapping[str, str]) -> Networks:
    by_host = {host: answer.interfaces for host, answer in answers.items() if answer.interfaces is not None}
    if len(by_host) < len(answers):
        # Ranks run in a container, and the hosts were not asked about the interfaces outside of it.
        return Networks()
    if plan.host_options.interface:
        require_interface(plan.host_options.interface, by_host)
        return Networks()
    variables = {**environment, **plan.environment, **plan.start.environment}
    if any(variables.get(name) for name in CHOICES) or any("btl_tcp_if" in word for word in plan.start.arguments):
        return Networks()
    chosen = choose_networks(by_host)
    # A variable that the user set for one library stays.
    kept = {name: value for name, value in chosen.variables.items() if not variables.get(name)}
    return replace(chosen, variables=kept)
