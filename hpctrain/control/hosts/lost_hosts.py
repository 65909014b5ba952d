"""How long a host may be silent until its ranks are taken for lost, and how often lost ones are looked for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpctrain.common.errors import HpctrainError

_MOST = 3600
DEFAULT_HOST_TIMEOUT = 45
_DEFAULT_INTERVAL = 30
# So many questions without an answer, after as long a silence as they take together.
_PROBES = 4


def host_timeout(environment: Mapping[str, str] = os.environ) -> int:
    """After how many seconds without a sign of life a host is lost, from ``HPCTRAIN_HOST_TIMEOUT``.

    Raises:
        HpctrainError: not a whole number of seconds, or too few or many.
    """
    return _seconds("HPCTRAIN_HOST_TIMEOUT", DEFAULT_HOST_TIMEOUT, 5, environment)


def host_interval(environment: Mapping[str, str] = os.environ) -> int:
    """The seconds between two looks at the hosts that an elastic run could have, from ``HPCTRAIN_HOST_INTERVAL``.

    Raises:
        HpctrainError: as of :func:`host_timeout`.
    """
    return _seconds("HPCTRAIN_HOST_INTERVAL", _DEFAULT_INTERVAL, 1, environment)


def _seconds(name: str, default: int, least: int, environment: Mapping[str, str]) -> int:
    text = environment.get(name, str(default))
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= _MOST):
        raise HpctrainError(
            f"{name}={text!r} is not a whole number of seconds from {least} to {_MOST}", f"unset {name}"
        )
    return int(text)


def keepalive_options(seconds: int) -> list[str]:
    """Options of Open MPI 5's mpirun with which its daemons miss each other after ``seconds``.

    A cable that is cut tells nobody. By default TCP's keepalive notices after 480 s, and by TCP alone a sender does
    after 15 minutes. mpirun then ends, and the daemon on a host that was cut off ends its ranks there. Sources:
    ``oob_tcp`` of PRRTE 3 (src/mca/oob/tcp/oob_tcp_component.c), https://man7.org/linux/man-pages/man7/tcp.7.html.
    """
    interval = max(1, round(seconds / (2 * _PROBES)))
    values = {"time": max(1, seconds - _PROBES * interval), "intvl": interval, "probes": _PROBES}
    return [word for name, value in values.items() for word in ("--prtemca", f"oob_tcp_keepalive_{name}", str(value))]
