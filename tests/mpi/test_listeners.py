"""Where ranks of one host listen: at its loopback interface, which no other host reaches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).parent / "programs" / "listens.py"
_HPCTRAIN = Path(sys.executable).parent / "hpctrain"


@pytest.mark.parametrize("backend", ["gloo", "mpi", "horovod"])
def test_ranks_of_one_host_listen_at_the_loopback_alone(backend: str, tmp_path: Path) -> None:
    start = [str(_HPCTRAIN), "run", str(_PROGRAM), "-np", "2", "--backend", backend, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([*start, "--", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert {address for addresses in found for address in addresses} <= {"127.0.0.1", "::1"}
    # gloo's ranks connect to each other, so that the test would see a listener.
    assert all(found) == (backend == "gloo")
