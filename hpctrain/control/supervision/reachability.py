"""Checks whether another host reaches this one on any port, as the daemons of an mpirun have to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterable, Iterator

from hpctrain.common.cluster.interfaces import Interface

_SECONDS = 3.0


def own_addresses(interfaces: Iterable[Interface]) -> tuple[str, ...]:
    """The addresses of a host at which others may reach it, of which mpirun's daemons try one after the other."""
    return tuple(
        address
        for one in interfaces
        if one.up and not one.host_only
        for address in one.addresses
        if not ipaddress.ip_address(address).is_link_local
    )


@contextlib.contextmanager
def listening(address: str) -> Iterator[int]:
    """Listen at an address of this host, at a free port, and close each connection at once; yields the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:

        def close_connections() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=close_connections, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            # Closing alone would leave the thread waiting in accept.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def reaches(address: str, port: int) -> bool:
    """Whether something answers there within three seconds."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_SECONDS):
        return True
    return False
