"""Ports for servers of the tests that have to be known before they are bound."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the kernel gives to connections, none of which can take a port before its server has it, or while the
# server is started again. Processes with neighbouring numbers look in different places.
_candidates = itertools.count(20000 + 20 * (os.getpid() % 600))


def free_port() -> int:
    """A port that nobody has now, and that no later call in this process returns."""
    for port in _candidates:
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
