"""How Open MPI's daemons notice that a host is lost."""

from __future__ import annotations

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
