"""Chooses the networks over which the ranks of several hosts connect, where MPI would use a wrong one. Pure.

Open MPI uses every interface that is up. An address that several hosts have, such as that of a container engine's
bridge, leads a rank back to its own host: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/tcp.html.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.common.cluster.interfaces import Interface
from hpctrain.common.cluster.launch_files import network_variables
from hpctrain.common.errors import HpctrainError

# The variables by which --interface, or the user, chooses networks.
INCLUDE = "OMPI_MCA_btl_tcp_if_include"
CHOICES = (INCLUDE, "OMPI_MCA_btl_tcp_if_exclude")

Interfaces = Mapping[str, Sequence[Interface]]


@dataclass(frozen=True, kw_only=True)
class Networks:
    """The network settings of every rank, and a note for the user; both are empty where MPI's own choice is right."""

    variables: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def choose_networks(by_host: Interfaces) -> Networks:
    """The networks that all hosts share, where one has an interface that leads to no other host.

    Hosts that reach each other through routers share none, and choose for themselves.

    Args:
        by_host: the interfaces of each host of a run.
    """
    if len(by_host) < 2:
        return Networks()
    counts = Counter(address for host in by_host.values() for address in {a for one in host for a in _addresses(one)})
    shared = {address for address, count in counts.items() if count > 1}

    def is_shared(one: Interface) -> bool:
        return not shared.isdisjoint(_addresses(one))

    def is_inner(one: Interface) -> bool:
        return is_shared(one) or (one.host_only and not _is_loopback(one))

    # First without bridges too, then only without shared addresses: a bridge may be a host's only network.
    for is_wrong in (is_inner, is_shared):
        wrong = [one.name for host in by_host.values() for one in host if one.networks and one.up and is_wrong(one)]
        right = {host: [one for one in found if _is_usable(one, is_wrong)] for host, found in by_host.items()}
        if wrong and all(right.values()) and (variables := _common_networks(right)):
            passed_over = ", ".join(dict.fromkeys(wrong))
            verb = "lead" if "," in passed_over else "leads"
            note = f"connections between hosts go over {variables[INCLUDE]}: {passed_over} {verb} to no other host"
            return Networks(variables=variables, note=note)
    return Networks()


def require_interface(interface: str, by_host: Interfaces) -> None:
    """Refuse an interface, or several with commas between them, that a host does not have."""
    names = set(interface.split(","))
    for host, found in by_host.items():
        up = [one.name for one in found if one.up]
        if names.isdisjoint(up):
            raise HpctrainError(
                "HT-interface-not-usable",
                "--interface {interface}: {host} has none of that name that is up",
                f"it has {', '.join(name for name in up if name != 'lo') or 'none'}",
                interface=interface,
                host=host,
            )


def _addresses(one: Interface) -> set[str]:
    """The IPv4 addresses by which other hosts may connect. IPv6 is left out: link-local addresses exist per link."""
    return (
        {address for address in one.addresses if "." in address and not address.startswith("127.")} if one.up else set()
    )


def _is_usable(one: Interface, is_wrong: Callable[[Interface], bool]) -> bool:
    there = any(not address.lower().startswith("fe80:") for address in one.addresses)
    return one.up and there and not _is_loopback(one) and not is_wrong(one)


def _is_loopback(one: Interface) -> bool:
    return one.name == "lo"


def _common_networks(right: Interfaces) -> dict[str, str]:
    """The variables for the networks of every host, by interface names where these are the same everywhere."""
    networks = [{network for one in host for network in one.networks} for host in right.values()]
    common = set.intersection(*networks)
    if not common:
        return {}
    names = [{one.name for one in host if not common.isdisjoint(one.networks)} for host in right.values()]
    if all(other == names[0] for other in names):
        return network_variables(interface=",".join(sorted(names[0])))
    # Gloo is not set here: it takes a single interface, and finds one without help.
    every = ",".join(sorted(set.union(*names)))
    return {"NCCL_SOCKET_IFNAME": f"={every}", INCLUDE: ",".join(sorted(common))}


# TCP sends this many keepalive probes, after a silence as long as the probes take together.
_PROBES = 4


def keepalive_options(seconds: int) -> list[str]:
    """Options of Open MPI 5's mpirun with which its daemons miss each other after ``seconds``.

    No packet announces a cut cable. PRRTE's default keepalive notices it after 480 s, and TCP without keepalive only
    when a sender has waited 15 minutes. mpirun then ends, and the daemon on the separated host ends its ranks. Sources:
    ``oob_tcp`` of PRRTE 3 (src/mca/oob/tcp/oob_tcp_component.c), https://man7.org/linux/man-pages/man7/tcp.7.html.
    """
    interval = max(1, round(seconds / (2 * _PROBES)))
    values = {"time": max(1, seconds - _PROBES * interval), "intvl": interval, "probes": _PROBES}
    return [word for name, value in values.items() for word in ("--prtemca", f"oob_tcp_keepalive_{name}", str(value))]
