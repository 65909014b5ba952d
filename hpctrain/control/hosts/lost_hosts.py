"""How Open MPI's daemons notice that a host is lost."""

from __future__ import annotations

# So many questions without an answer, after as long a silence as they take together.
_PROBES = 4


def keepalive_options(seconds: int) -> list[str]:
    """Options of Open MPI 5's mpirun with which its daemons miss each other after ``seconds``.

    A cable that is cut tells nobody. By default TCP's keepalive notices after 480 s, and by TCP alone a sender does
    after 15 minutes. mpirun then ends, and the daemon on a host that was cut off ends its ranks there. Sources:
    ``oob_tcp`` of PRRTE 3 (src/mca/oob/tcp/oob_tcp_component.c), https://man7.org/linux/man-pages/man7/tcp.7.html.
    """
    interval = max(1, round(seconds / (2 * _PROBES)))
    values = {"time": max(1, seconds - _PROBES * interval), "intvl": interval, "probes": _PROBES}
    return [word for name, value in values.items() for word in ("--prtemca", f"oob_tcp_keepalive_{name}", str(value))]
