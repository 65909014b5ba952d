"""InfiniBand and RoCE: ports, rates, names of adapters, GIDs, and whether anything falls back to TCP."""

from __future__ import annotations

from hpctrain.common.cluster.checks import Check
from hpctrain.control.doctor.facts import Host, PortFacts

_PORT_SOURCE = "https://man7.org/linux/man-pages/man8/ibportstate.8.html"
_ENVIRONMENT = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_HCA_SOURCE = f"{_ENVIRONMENT}#nccl-ib-hca"
_GID_SOURCE = f"{_ENVIRONMENT}#nccl-ib-gid-index"
_TCP_SOURCE = "https://openucx.readthedocs.io/en/master/faq.html"

# Transports of UCX that use the adapter.
_RDMA = frozenset(
    {"all", "ib", "rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "ud", "ud_x", "ud_v", "dc", "dc_x", "dc_mlx5"}
)
_NO_ADAPTER = "no InfiniBand or RoCE adapter in /sys/class/infiniband"


def ports(host: Host) -> Check:
    """Every adapter that training may use has a port that is up, and no port waits for a subnet manager."""
    name = "adapter ports"
    if not host.ports:
        return Check(name=name, status="not applicable", found=_NO_ADAPTER, source=_PORT_SOURCE)
    used = [port for port in host.ports if _is_chosen(port, host)]
    live = {port.adapter for port in host.active}
    waiting = [port for port in used if port.state in ("INIT", "ARMED")]
    dead = [port for port in used if port.adapter not in live and port not in waiting]
    if waiting:
        remedy = "start a subnet manager (opensm) in that fabric; then: ibstat"
    else:
        remedy = f"check the cable: ibstat; or leave it out: export NCCL_IB_HCA=^={','.join(_adapters(dead))}"
    failed = [*waiting, *dead]
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=", ".join(f"{port} {port.state}" for port in failed or used),
        wanted="a port of each adapter ACTIVE",
        remedy=remedy if failed else "",
        source=_PORT_SOURCE,
    )


def rates(host: Host) -> Check:
    """A damaged cable, or one in the wrong port, negotiates fewer lanes or a lower speed than its neighbours."""
    name = "adapter rates"
    used = [port for port in host.active if _is_chosen(port, host) and port.rate == port.rate]
    if not used:
        found = "no port is up" if host.ports else _NO_ADAPTER
        return Check(name=name, status="not applicable", found=found, source=_PORT_SOURCE)
    best = {port.link_layer: max(p.rate for p in used if p.link_layer == port.link_layer) for port in used}
    slow = [port for port in used if port.rate < best[port.link_layer]]
    remedy = f"reseat or replace the cable: iblinkinfo; or export NCCL_IB_HCA=^={','.join(_adapters(slow))}"
    return Check(
        name=name,
        status="failed" if slow else "ok",
        found=", ".join(f"{port} {port.rate:g} Gbit/s" for port in slow or used),
        wanted=", ".join(f"{rate:g} Gbit/s ({layer}), like the fastest here" for layer, rate in best.items()),
        remedy=remedy if slow else "",
        source=_PORT_SOURCE,
    )


def adapter_names(host: Host) -> Check:
    """``NCCL_IB_HCA`` matches prefixes unless a ``=`` is in front: ``mlx5_1`` also takes ``mlx5_10``."""
    name, value = "NCCL_IB_HCA", host.environment.get("NCCL_IB_HCA", "")
    if not value or not host.ports:
        found = f"{value or 'not set'}; {_NO_ADAPTER}" if not host.ports else "not set: NCCL takes every adapter"
        return Check(name=name, status="not applicable", found=found, source=_HCA_SOURCE)
    adapters = list(dict.fromkeys(port.adapter for port in host.ports))
    words = _hca_words(value)
    sign = value[: len(value) - len(value.lstrip("^="))]
    lost = [word for word in words if not any(_hca_matches(adapter, word, sign) for adapter in adapters)]
    surplus = [
        f"{word} also takes {adapter}"
        for word in words
        for adapter in adapters
        if word in adapters and adapter != word and _hca_matches(adapter, word, sign)
    ]
    kept = [word for word in words if word not in lost] or adapters
    exact = f"{'^' if '^' in sign else ''}={','.join(kept)}"
    fault = "; ".join([*(f"{word} is not here" for word in lost), *surplus])
    return Check(
        name=name,
        status="failed" if fault else "ok",
        found=f"{value}: {fault}" if fault else value,
        wanted=f"names of this host ({', '.join(adapters)}), '=' in front where one begins another",
        remedy=f"export NCCL_IB_HCA={exact}" if fault else "",
        source=_HCA_SOURCE,
    )


def roce_gid(host: Host) -> Check:
    """RoCE v2, which routers pass on, needs a GID of its kind, and ``NCCL_IB_GID_INDEX`` has to point to one."""
    name = "RoCE GID"
    ethernet = [port for port in host.active if port.link_layer == "Ethernet" and _is_chosen(port, host)]
    if not ethernet:
        return Check(name=name, status="not applicable", found="no RoCE port is up", source=_GID_SOURCE)
    index = host.environment.get("NCCL_IB_GID_INDEX", "-1")
    bare = [port for port in ethernet if not port.roce_v2]
    shared = sorted(set.intersection(*(set(port.roce_v2) for port in ethernet)))
    if bare:
        fault, remedy = (
            f"{bare[0]} has no RoCE v2 GID",
            "give its network interface an IP address: ip address; show_gids",
        )
    elif index != "-1" and not (index.isdigit() and int(index) in shared):
        fault = f"NCCL_IB_GID_INDEX={index} is no RoCE v2 GID of every port"
        remedy = f"export NCCL_IB_GID_INDEX={shared[-1]}" if shared else "unset NCCL_IB_GID_INDEX"
    else:
        fault = remedy = ""
    chosen = f"index {index}" if index != "-1" else "index chosen by NCCL"
    return Check(
        name=name,
        status="failed" if fault else "ok",
        found=fault or f"RoCE v2 at {', '.join(map(str, shared)) or 'a different index per port'}; {chosen}",
        wanted="a RoCE v2 entry on each port, and NCCL_IB_GID_INDEX its number or not set",
        remedy=remedy,
        source=_GID_SOURCE,
    )


def tcp_fallback(host: Host) -> Check:
    """No setting and no missing device sends the traffic over TCP although an adapter is up."""
    name = "TCP fallback"
    if not host.active:
        found = "no port is up" if host.ports else f"{_NO_ADAPTER}: only TCP is available"
        return Check(name=name, status="not applicable", found=found, source=_TCP_SOURCE)
    faults = _settings_for_tcp(host)
    if not host.verbs:
        load = "as root: modprobe ib_uverbs; in a container: --device /dev/infiniband"
        faults["no device in /dev/infiniband that this user may open"] = load
    return Check(
        name=name,
        status="failed" if faults else "ok",
        found="; ".join(faults) or f"{', '.join(host.verbs)} usable, no setting against RDMA",
        wanted="traffic over the adapter",
        remedy="; ".join(faults.values()),
        source=_TCP_SOURCE,
    )


def _settings_for_tcp(host: Host) -> dict[str, str]:
    """Settings that keep traffic off the adapter, and the remedy for each."""
    environment = host.environment
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
    return faults


def _is_chosen(port: PortFacts, host: Host) -> bool:
    """Whether ``NCCL_IB_HCA`` allows a port."""
    value = host.environment.get("NCCL_IB_HCA", "")
    if not value:
        return True
    sign = value[: len(value) - len(value.lstrip("^="))]
    named = any(_hca_matches(port.adapter, word, sign) for word in _hca_words(value))
    return named != ("^" in sign)


def _hca_words(value: str) -> list[str]:
    """The adapters that a value names, without their ports."""
    return [word.strip().partition(":")[0] for word in value.lstrip("^=").split(",") if word.strip()]


def _hca_matches(adapter: str, word: str, sign: str) -> bool:
    return adapter == word if "=" in sign else adapter.startswith(word)


def _adapters(ports: list[PortFacts]) -> list[str]:
    return list(dict.fromkeys(port.adapter for port in ports))
