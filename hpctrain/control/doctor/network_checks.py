"""The checks of a host's network: interfaces that the environment names, InfiniBand and RoCE, and fallbacks to TCP."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from functools import partial

from hpctrain.common.cluster.checks import Check, judge, skip
from hpctrain.common.cluster.interfaces import Interface, RdmaPort
from hpctrain.control.doctor.host_facts import Host

# Transports of UCX that use the adapter.
_RDMA = frozenset(
    {"all", "ib", "rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "ud", "ud_x", "ud_v", "dc", "dc_x", "dc_mlx5"}
)
_NO_ADAPTER = "no InfiniBand or RoCE adapter in /sys/class/infiniband"


def nccl_interfaces(host: Host) -> Check:
    """``NCCL_SOCKET_IFNAME``: prefixes, exact names after ``=``, all others after ``^``.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname.
    """
    value = host.environment.get("NCCL_SOCKET_IFNAME", "")
    exact, words = value.lstrip("^").startswith("="), _words(value.lstrip("^="))

    def matching(word: str) -> list[Interface]:
        return [one for one in host.interfaces if (one.name == word if exact else one.name.startswith(word))]

    chosen = {word: matching(word) for word in words}
    if value.startswith("^"):
        named = [one for interfaces in chosen.values() for one in interfaces]
        # NCCL itself skips interfaces that are down and the loopback.
        chosen = {value: [one for one in host.interfaces if one not in named and one.up and one.name != "lo"]}
    return _chosen_interfaces(host, "NCCL_SOCKET_IFNAME", chosen, sign="=")


def _named_interfaces(host: Host, *, variable: str) -> Check:
    """The check of a variable that has exact names."""
    words = _words(host.environment.get(variable, ""))
    return _chosen_interfaces(host, variable, {word: _named(word, host.interfaces) for word in words})


gloo_interfaces = partial(_named_interfaces, variable="GLOO_SOCKET_IFNAME")
# Or networks such as 10.0.0.0/8: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/tcp.html.
open_mpi_interfaces = partial(_named_interfaces, variable="OMPI_MCA_btl_tcp_if_include")


def _chosen_interfaces(host: Host, variable: str, chosen: dict[str, list[Interface]], *, sign: str = "") -> Check:
    """The check of a variable, by the interfaces that each word of it chooses."""
    if not chosen:
        return skip(variable, "not set: the library chooses by itself")
    interfaces = [one for several in chosen.values() for one in several]
    missing = [word for word, several in chosen.items() if not several]
    down = [one.name for one in interfaces if not one.up]
    inner = [one.name for one in interfaces if one.host_only]
    fault = ""
    if missing:
        fault = f"{', '.join(missing)} is not here"
    elif down:
        fault = f"{', '.join(down)} is down"
    elif inner:
        fault = f"no other host reaches {', '.join(inner)}"
    usable = _usable(host)
    return judge(
        variable,
        f"{host.environment[variable]}: {fault or ', '.join(one.name for one in interfaces)}",
        failed=bool(fault),
        wanted=f"of this host: {', '.join(usable) or 'no interface is up'}",
        remedy=f"export {variable}={sign}{usable[0]}" if usable else f"unset {variable}",
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


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def automatic_interfaces(host: Host) -> Check:
    """Without a choice of the user Open MPI connects over every interface but the loopback."""
    name = "interfaces"
    for variable in ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"):
        if host.environment.get(variable):
            return skip(name, f"chosen by {variable}, not by Open MPI")
    inner = [one.name for one in host.interfaces if one.host_only and one.up and one.name != "lo"]
    usable = _usable(host)
    found = f"{', '.join(usable) or 'none'} for other hosts"
    if inner:
        found += f"; {', '.join(inner)}: known only on this host"
    if host.hosts == 1:
        return skip(name, f"{found}; one host connects to none")
    return judge(
        name,
        found,
        failed=bool(inner) or not usable,
        wanted="interfaces that reach the other hosts, and no others",
        remedy=f"hpctrain run --interface {usable[0]}" if usable else "bring one up to the other hosts: ip link",
    )


def _usable(host: Host) -> list[str]:
    """Interfaces that other hosts may reach, IP over InfiniBand first, then those with an address."""
    usable = [one for one in host.interfaces if one.up and not one.host_only]
    usable.sort(key=lambda one: (not one.name.startswith("ib"), not one.addresses, one.name))
    return [one.name for one in usable]


def adapter_ports(host: Host) -> Check:
    """Every adapter that training may use has a port that is up, and no port waits for a subnet manager."""
    name = "adapter ports"
    if not host.ports:
        return skip(name, _NO_ADAPTER)
    used = [port for port in host.ports if _is_chosen(port, host)]
    live = {port.adapter for port in host.ports if port.active}
    waiting = [port for port in used if port.state in ("INIT", "ARMED")]
    dead = [port for port in used if port.adapter not in live and port not in waiting]
    remedy = f"check the cable: ibstat; or leave it out: export NCCL_IB_HCA=^={_adapters(dead)}"
    if waiting:
        remedy = "start a subnet manager (opensm) in that fabric; then: ibstat"
    failed = [*waiting, *dead]
    found = ", ".join(f"{port} {port.state}" for port in failed or used)
    return judge(name, found, failed=bool(failed), wanted="a port of each adapter ACTIVE", remedy=remedy)


def tcp_fallback(host: Host) -> Check:
    """No setting and no missing device sends the traffic over TCP although an adapter is up."""
    name, environment = "TCP fallback", host.environment
    if not any(port.active for port in host.ports):
        return skip(name, "no port is up" if host.ports else f"{_NO_ADAPTER}: only TCP is available")
    faults = {}
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        faults["NCCL_IB_DISABLE=" + environment["NCCL_IB_DISABLE"]] = "unset NCCL_IB_DISABLE"
    if environment.get("NCCL_NET", "").lower() == "socket":
        faults["NCCL_NET=" + environment["NCCL_NET"]] = "unset NCCL_NET"
    transports = environment.get("UCX_TLS", "all")
    if not transports.startswith("^") and not _RDMA.intersection(transports.split(",")):
        faults[f"UCX_TLS={transports}"] = "unset UCX_TLS"
    if environment.get("OMPI_MCA_pml") == "ob1":
        faults["OMPI_MCA_pml=ob1"] = "unset OMPI_MCA_pml"
    if not host.verbs:
        load = "as root: modprobe ib_uverbs; in a container: --device /dev/infiniband"
        faults["no device in /dev/infiniband that this user may open"] = load
    found = "; ".join(faults) or f"{', '.join(host.verbs)} usable, no setting against RDMA"
    return judge(name, found, failed=bool(faults), wanted="traffic over the adapter", remedy="; ".join(faults.values()))


def _is_chosen(port: RdmaPort, host: Host) -> bool:
    """Whether ``NCCL_IB_HCA`` allows a port: prefixes of adapters, exact names after ``=``, all others after ``^``."""
    value = host.environment.get("NCCL_IB_HCA", "")
    if not value:
        return True
    sign = value[: len(value) - len(value.lstrip("^="))]
    words = [word.partition(":")[0] for word in _words(value.lstrip("^="))]
    name = port.adapter.name
    named = any(name == word if "=" in sign else name.startswith(word) for word in words)
    return named != ("^" in sign)


def _adapters(ports: Sequence[RdmaPort]) -> str:
    return ",".join(dict.fromkeys(port.adapter.name for port in ports))


CHECKS: tuple[Callable[[Host], Check], ...] = (
    nccl_interfaces,
    gloo_interfaces,
    open_mpi_interfaces,
    automatic_interfaces,
    adapter_ports,
    tcp_fallback,
)
