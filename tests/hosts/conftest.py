"""Four hosts on links of 1 Gbit/s, and the command line as a user of the first of them has it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import local_hosts
from support.hosts.local_hosts import LocalHosts
from support.launching import AS_ROOT, STARTUP, Launch
from support.startup import warm_start

_PROGRAMS = Path(sys.executable).parent
_CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def started_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHosts]:
    """Hosts h1 to h4, which see the checkout and the folders of the tests."""
    if reason := local_hosts.obstacle():
        pytest.skip(reason)
    folder = Path(tempfile.gettempdir(), f"hpctrain-hosts-{secrets.token_hex(4)}")
    warm = os.environ[warm_start.DIRECTORY]
    # What links point to too: the environment may be one.
    shared = {tmp_path_factory.getbasetemp(), _CHECKOUT, Path(sys.prefix).resolve(), Path(warm)}
    variables = {"PYTHONPATH": f"{STARTUP}{os.pathsep}{_CHECKOUT}", warm_start.DIRECTORY: warm, **AS_ROOT}
    with LocalHosts(folder, shared=sorted(shared), variables=variables) as hosts:
        yield hosts


@pytest.fixture
def hosts(started_hosts: LocalHosts) -> Iterator[LocalHosts]:
    """The hosts as they were started, whatever the test before did to them."""
    yield started_hosts
    started_hosts.restore()


@pytest.fixture
def hosts_hpctrain(hosts: LocalHosts, tmp_path: Path) -> Launch:
    """``hosts_hpctrain("run", "digits", "-H", "h1,h2", …)``: the command line on h1, in the test's own folder."""

    def launch(
        *arguments: str, timeout: float = 120, host: str = "h1", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        command = (str(_PROGRAMS / "hpctrain"), *arguments)
        return hosts.run(host, *command, cwd=tmp_path, check=False, timeout=timeout, **variables)

    return launch
