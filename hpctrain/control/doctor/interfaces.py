"""Checks that the network interfaces named in the environment exist, are up, and are reachable from other hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.interfaces import Interface
from hpctrain.control.doctor.facts import Host

_NCCL_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname"
_MPI_SOURCE = "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/tcp.html"
_GLOO_SOURCE = "https://pytorch.org/docs/stable/distributed.html"
_UCX_SOURCE = "https://openucx.readthedocs.io/en/master/faq.html"


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The interfaces of this host that a variable chooses, and the words of it that match nothing here."""

    interfaces: tuple[Interface, ...] = ()
    missing: tuple[str, ...] = ()


def nccl(host: Host) -> Check:
    """``NCCL_SOCKET_IFNAME``: prefixes, exact names after ``=``, all others after ``^``."""
    return _check(host, "NCCL_SOCKET_IFNAME", "NCCL", _nccl_choice, _NCCL_SOURCE, sign="=")


def gloo(host: Host) -> Check:
    """``GLOO_SOCKET_IFNAME``: exact names."""
    return _check(host, "GLOO_SOCKET_IFNAME", "Gloo", _exact_choice, _GLOO_SOURCE)


def open_mpi(host: Host) -> Check:
    """``OMPI_MCA_btl_tcp_if_include``: exact names, or networks such as 10.0.0.0/8."""
    return _check(host, "OMPI_MCA_btl_tcp_if_include", "Open MPI", _exact_choice, _MPI_SOURCE)


def ucx(host: Host) -> Check:
    """``UCX_NET_DEVICES``: interfaces, or ports of adapters such as ``mlx5_0:1``."""
    return _check(host, "UCX_NET_DEVICES", "UCX", _ucx_choice, _UCX_SOURCE)


def automatic(host: Host) -> Check:
    """Without a choice of the user Open MPI connects over every interface but the loopback."""
    name = "interfaces"
    for variable in ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"):
        if host.environment.get(variable):
            return Check(
                name=name, status="not applicable", found=f"chosen by {variable}, not by Open MPI", source=_MPI_SOURCE
            )
    inner = [one.name for one in host.interfaces if one.host_only and one.up and not _is_loopback(one)]
    usable = [one.name for one in _usable(host)]
    found = f"{', '.join(usable) or 'none'} for other hosts"
    if inner:
        found += f"; {', '.join(inner)}: known only on this host, and Open MPI uses them too"
    if host.hosts == 1:
        return Check(
            name=name, status="not applicable", found=f"{found}; one host connects to none", source=_MPI_SOURCE
        )
    failed = bool(inner) or not usable
    remedy = f"hpctrain run --interface {usable[0]}" if usable else "bring up the interface to the other hosts: ip link"
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=found,
        wanted="interfaces that reach the other hosts, and no others",
        remedy=remedy if failed else "",
        source=_MPI_SOURCE,
    )


def _check(
    host: Host, variable: str, library: str, choose: Callable[[str, Host], _Choice], source: str, *, sign: str = ""
) -> Check:
    value = host.environment.get(variable, "")
    if not value:
        return Check(
            name=variable, status="not applicable", found=f"not set: {library} chooses by itself", source=source
        )
    choice = choose(value, host)
    fault = _fault(choice)
    usable = [one.name for one in _usable(host)]
    return Check(
        name=variable,
        status="failed" if fault else "ok",
        found=f"{value}: {fault or ', '.join(one.name for one in choice.interfaces) or 'adapters of this host'}",
        wanted=f"of this host: {', '.join(usable) or 'no interface is up'}",
        remedy=(f"export {variable}={sign}{usable[0]}" if usable else f"unset {variable}") if fault else "",
        source=source,
    )


def _fault(choice: _Choice) -> str:
    if choice.missing:
        return f"{', '.join(choice.missing)} is not here"
    if down := [one.name for one in choice.interfaces if not one.up]:
        return f"{', '.join(down)} is down"
    if inner := [one.name for one in choice.interfaces if one.host_only]:
        return f"no other host reaches {', '.join(inner)}"
    return ""


def _nccl_choice(value: str, host: Host) -> _Choice:
    without = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = _words(value.lstrip("^="))

    def matches(name: str, word: str) -> bool:
        return name == word if exact else name.startswith(word)

    if without:
        left = [one for one in host.interfaces if not any(matches(one.name, word) for word in words)]
        # NCCL itself skips interfaces that are down and the loopback.
        chosen = tuple(one for one in left if one.up and not _is_loopback(one))
        return _Choice(interfaces=chosen, missing=() if chosen else (value,))
    return _Choice(
        interfaces=tuple(one for one in host.interfaces if any(matches(one.name, word) for word in words)),
        missing=tuple(word for word in words if not any(matches(one.name, word) for one in host.interfaces)),
    )


def _exact_choice(value: str, host: Host) -> _Choice:
    found = {word: _named(word, host.interfaces) for word in _words(value)}
    return _Choice(
        interfaces=tuple(one for interfaces in found.values() for one in interfaces),
        missing=tuple(word for word, interfaces in found.items() if not interfaces),
    )


def _named(word: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """The interface of a name, or those with an address in a network."""
    if "/" not in word:
        return [one for one in interfaces if one.name == word]
    try:
        network = ipaddress.ip_network(word, strict=False)
    except ValueError:
        return []
    return [one for one in interfaces if any(ipaddress.ip_address(address) in network for address in one.addresses)]


def _ucx_choice(value: str, host: Host) -> _Choice:
    if value == "all" or value.startswith("^"):
        return _Choice()
    ports = {str(port) for port in host.active}
    return _exact_choice(",".join(word for word in _words(value) if word not in ports), host)


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def _usable(host: Host) -> list[Interface]:
    """Interfaces that other hosts may reach, IP over InfiniBand first, then those with an address."""
    usable = [one for one in host.interfaces if one.up and not one.host_only]
    return sorted(usable, key=lambda one: (not one.name.startswith("ib"), not one.addresses, one.name))


def _is_loopback(interface: Interface) -> bool:
    return interface.name == "lo"
