"""The hosts of the tests are hosts: names, addresses, files, processes and links of their own, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.hosts.local_hosts import HostsError, LocalHosts, obstacle
from support.startup import warm_start


def test_each_has_a_name_an_address_and_temporary_files_of_its_own(hosts: LocalHosts, tmp_path: Path):
    for number, host in enumerate(hosts.names, 1):
        look = f"hostname; hostname -i; ls -A /tmp /dev/shm /run; cat /proc/1/comm; touch /tmp/{host} {tmp_path}/{host}"
        name, address, *rest = hosts.run(host, "sh", "-c", look).stdout.split()
        assert (name, address) == (host, f"10.77.0.{number}")
        assert not {"h1", "h2", "h3", "h4"} & set(rest)
        assert rest[-1] == "sshd"
    # What is shared is the same everywhere.
    assert {path.name for path in tmp_path.iterdir()} == set(hosts.names)


def test_a_rank_begins_in_a_warm_interpreter_and_on_its_host(hosts: LocalHosts, tmp_path: Path):
    """With all that is the host's own, under a number that is there, and it ends as it would anywhere."""
    pytest.importorskip("torch")
    (tmp_path / "rank.py").write_text(
        "import sys; warm = 'torch' in sys.modules\nimport torch\nimport os, platform, signal, socket, subprocess\n"
        "names = {socket.gethostname(), platform.node()}\nprint(warm, *names, torch.get_num_threads())\n"
        "print(*os.listdir('/dev/shm'), flush=True)\nsubprocess.run(['ps', '-o', 'pid=', '-p', str(os.getpid())])\n"
        "print(os.getpid(), flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\n"
    )
    hosts.run("h2", "touch", "/dev/shm/of-h2")
    # A host has a new environment, and what libraries have read from the user's cannot be taken back.
    read = {name: value for name, value in warm_start.surroundings().items() if name in os.environ}
    variables = {**read, **warm_start.READ_AT_IMPORT, "OMP_NUM_THREADS": "2"}
    result = hosts.run("h2", "python", "rank.py", cwd=tmp_path, check=False, **variables)
    warm, shm, listed, own = result.stdout.splitlines()
    assert warm == "True h2 2"
    # Ranks that tests before killed on this host may have left files.
    assert sorted(shm.split()) == sorted(hosts.run("h2", "ls", "-A", "/dev/shm").stdout.split())
    assert "of-h2" in shm.split()
    assert listed.strip() == own
    assert result.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_host_that_is_killed_takes_its_processes_and_files_along(hosts: LocalHosts):
    hosts.run("h3", "touch", "/tmp/file", "/dev/shm/file")
    left = subprocess.Popen(hosts.command("h3", "sleep", "1000"))
    hosts.kill("h3")
    assert left.wait(timeout=60) != 0
    with pytest.raises(HostsError, match="h3 is down"):
        hosts.run("h3", "true")
    hosts.boot("h3")
    assert not re.search("file", hosts.run("h3", "ls", "/tmp", "/dev/shm").stdout)
    assert hosts.run("h1", "ssh", "h3", "hostname").stdout == "h3\n"


def test_nothing_is_left_when_the_process_that_started_them_is_killed(tmp_path: Path):
    if reason := obstacle():
        pytest.skip(reason)
    folder = tmp_path / "hosts"
    script = f"""\
import pathlib, signal
from support.hosts.local_hosts import LocalHosts, Settings
LocalHosts(pathlib.Path({str(folder)!r}), Settings(hosts=2)).start()
print("up", flush=True)
signal.pause()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"up\n"
    family = psutil.Process(starter.pid).children(recursive=True)
    assert len(family) >= 6
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left
    assert not folder.exists()
