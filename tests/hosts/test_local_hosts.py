"""The hosts of the tests are hosts: names, addresses, files, processes and links of their own, and nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.hosts.local_hosts import LocalHosts
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
