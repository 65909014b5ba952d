"""All checks of one host, and the checks of many hosts as few lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.settings import BACKEND
from hpctrain.control.doctor import gpus, infiniband, interfaces, limits, software, storage
from hpctrain.control.doctor.facts import Host
from hpctrain.control.horovod import check as horovod

CHECKS: tuple[Callable[[Host], Check], ...] = (
    limits.memlock,
    limits.open_files,
    limits.shared_memory,
    limits.temporary_folder,
    interfaces.nccl,
    interfaces.gloo,
    interfaces.open_mpi,
    interfaces.ucx,
    interfaces.automatic,
    infiniband.ports,
    infiniband.rates,
    infiniband.adapter_names,
    infiniband.roce_gid,
    infiniband.tcp_fallback,
    gpus.visible,
    gpus.peer_memory,
    gpus.access_control,
    gpus.distance,
)
_ORDER = ("failed", "ok", "not applicable")
# At most this many different answers are listed.
_LISTED_ANSWERS = 3


def check_host(host: Host, run_directory: Path) -> list[Check]:
    """Everything that can be checked on a host by itself.

    Args:
        run_directory: where runs are to write; need not be there yet.
    """
    disk = storage.try_disk(run_directory)
    return [
        *(check(host) for check in CHECKS),
        storage.space(disk),
        storage.write(disk),
        *software.horovod(horovod.report(), len(host.node_map.gpus), asked=BACKEND.read() == "horovod"),
    ]


def merge(by_host: Mapping[str, Sequence[Check]]) -> list[Check]:
    """The checks of several hosts, merged into one for all hosts with the same outcome.

    What was found may differ between them, as a measured speed does: it is listed with its hosts.
    """
    groups: dict[tuple[str, str, str, str], dict[str, Check]] = {}
    for host, checks in by_host.items():
        for check in checks:
            groups.setdefault((check.name, check.status, check.wanted, check.remedy), {})[host] = check
    merged = []
    for found in groups.values():
        where = tuple(found) if len(found) < len(by_host) else ()
        merged.append(replace(next(iter(found.values())), found=_answers(found), where=where))
    return merged


def failed_first(checks: Sequence[Check]) -> list[Check]:
    """Failed, then passed, then what does not apply; the order of the checks within each."""
    return sorted(checks, key=lambda check: _ORDER.index(check.status))


def _answers(found: Mapping[str, Check]) -> str:
    hosts: dict[str, list[str]] = {}
    for host, check in found.items():
        hosts.setdefault(check.found, []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    listed = [f"{fold_hosts(names)}: {text}" for text, names in list(hosts.items())[:_LISTED_ANSWERS]]
    rest = [name for names in list(hosts.values())[_LISTED_ANSWERS:] for name in names]
    return "; ".join([*listed, *([f"others on {fold_hosts(rest)}"] if rest else [])])
