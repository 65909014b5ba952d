"""A limit on the memory of this process while a library reads what somebody else made."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Let this process take at most so many bytes of memory more than it has.

    What asks for more gets MemoryError or its library's equivalent; a library that cannot fail (Rust's) ends the
    process. All threads are affected. Memory that files or other processes share does not count.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    has = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in (has + more, *before) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
