"""Where ranks of one host listen: at its loopback interface, which no other host reaches."""

from __future__ import annotations

import json
from pathlib import Path

from support.launching import Launch

_PROGRAM = Path(__file__).parent / "programs" / "listens.py"


# gloo's ranks connect to each other, so that the test would see a listener. It may keep its own to the end.
_BACKENDS = ("mpi", "horovod", "gloo")


def test_ranks_of_one_host_listen_at_the_loopback_alone(hpctrain: Launch, tmp_path: Path) -> None:
    done = hpctrain("run", str(_PROGRAM), "-np", "2", "--backend", "mpi", "--", str(tmp_path), *_BACKENDS)
    assert done.returncode == 0, done.stdout
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for backend in _BACKENDS:
        addresses = [rank[backend] for rank in found]
        assert {address for each in addresses for address in each} <= {"127.0.0.1", "::1"}, backend
        assert all(addresses) == (backend == "gloo"), backend
