"""Whether another host reaches this one on any port, as the daemons of an mpirun have to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence

_SECONDS = 5.0


def own_address(addresses: Sequence[str]) -> str | None:
    """The address of this host from which packets go to the first of another's; None where there is no way."""
    for address in addresses[:1]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: the kernel only looks up the way.
            probe.connect((address, 9))
            own = str(probe.getsockname()[0])
            return None if ipaddress.ip_address(own).is_link_local else own
    return None


@contextlib.contextmanager
def listening(address: str) -> Iterator[int]:
    """Listen at an address of this host, at a port that the system finds free. Who connects is let go at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:

        def let_go() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=let_go, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            # Closing alone would leave the thread in its wait.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def reaches(address: str, port: int) -> bool:
    """Whether something answers there within five seconds."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_SECONDS):
        return True
    return False
