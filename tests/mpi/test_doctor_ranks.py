"""``hpctrain doctor`` on real ranks, and where launcher and MPI do not match."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpctrain
from support.launching import Launch

PROGRAM = Path(hpctrain.__file__).parent / "worker" / "programs" / "doctor.py"
# Starts as many processes as it is asked for, each of which MPI takes for the only one.
SINGLETONS = """\
#!/bin/sh
[ "$1" = --version ] && { echo "mpirun (Open MPI) 5.0.11"; exit; }
while [ $# -gt 0 ]; do case $1 in */python*) break ;; esac; shift; done
"$@" & "$@" & wait
"""
HANGING = '#!/bin/sh\n[ "$1" = --version ] && { echo "mpirun (Open MPI) 5.0.11"; exit; }\nexec sleep 600\n'


LAUNCHED = "launcher and MPI"
REDUCED = ("1 MB all-reduce, MPI", "1 MB all-reduce, Horovod")
SEES_OR_SAYS = r"sees (\d)|says (\d)"
SEES_2 = [("2", ""), ("", "2")]


def checks_by_name(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def fake_mpirun(folder: Path, text: str) -> str:
    """A PATH on which this script is mpirun."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "mpirun"
    program.write_text(text)
    program.chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def test_two_ranks(hpctrain: Launch, tmp_path: Path) -> None:
    result = hpctrain("doctor", "-np", "2", "--json")
    assert result.returncode in (0, 3), result.stdout
    checks = checks_by_name(result)
    launched, plain, horovod = (checks[name] for name in (LAUNCHED, *REDUCED))
    assert "Open MPI" in launched["found"] and re.findall(SEES_OR_SAYS, launched["found"]) == SEES_2
    assert plain["status"] == "ok"
    # between a slow network's time and anything that is sold
    assert 1e-3 < float(plain["found"].partition(" ")[0]) < 1e4
    assert horovod["status"] != "failed", horovod
    assert "numpy" in checks["versions"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_ranks_without_mpi(hpctrain: Launch) -> None:
    result = hpctrain("doctor", "-np", "2", "--launcher", "torchrun", "--json")
    checks = checks_by_name(result)
    assert checks[LAUNCHED]["status"] == "not applicable"
    assert checks["1 MB all-reduce, Gloo"]["status"] == "ok"
    assert not checks.keys() & {*REDUCED, "ranks"}
    assert "torch" in checks["versions"]["found"]


def test_ranks_of_a_fresh_installation_do_not_need_horovod(hpctrain: Launch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name.split('.')[0] == 'horovod' else find(name, *rest)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    checks = checks_by_name(hpctrain("doctor", "-np", "2", "--json", PYTHONPATH=path))
    assert checks["1 MB all-reduce, MPI"]["status"] == "ok"
    assert checks["Horovod"]["status"] == "not applicable" and "not built" in checks["Horovod"]["found"]


def test_ranks_are_started_as_those_of_a_run(hpctrain: Launch, tmp_path: Path) -> None:
    """In a container, by another interpreter, with a variable of the user's that chooses an interface of no host."""
    path = fake_mpirun(tmp_path, '#!/bin/sh\nexec "$REAL" "$@"\n')
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        'while [ "$1" != image.sif ]; do shift; done\nshift\nexport CONTAINED=yes\nexec "$@"\n'
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$CONTAINED" >> {tmp_path}/pythons\nexec {sys.executable} "$@"\n')
    for program in (apptainer, python):
        program.chmod(0o755)
    (tmp_path / "image.sif").touch()
    real = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    start = ("--container", "image.sif", "--python", str(python), "--env", "NCCL_SOCKET_IFNAME==nope0")
    result = hpctrain("doctor", *start, "-np", "2", "--run-dir", "runs", "--json", PATH=path, REAL=str(real))
    assert result.returncode == 3, result.stdout
    checks = checks_by_name(result)
    assert "sees 2" in checks[LAUNCHED]["found"], checks
    assert "nope0" in checks["NCCL_SOCKET_IFNAME"]["found"]
    assert (tmp_path / "pythons").read_text() == "yes\nyes\n"
    # The folder of the runs is the ranks' to write.
    assert f"--bind {tmp_path} image.sif" in (tmp_path / "calls").read_text()


def test_a_mismatched_mpi_is_said(hpctrain: Launch, tmp_path: Path) -> None:
    path = fake_mpirun(tmp_path, SINGLETONS)
    result = hpctrain("doctor", "-np", "2", "--json", timeout=200, PATH=path)
    assert result.returncode == 3, result.stdout
    check = checks_by_name(result)[LAUNCHED]
    assert check["status"] == "failed"
    assert "sees 1" in check["found"]
    assert "srun --mpi=pmix" in check["remedy"]
    # What this machine itself says is there too.
    assert "open files" in checks_by_name(result)


def test_a_launcher_that_hangs_is_ended(hpctrain: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain.common.run.plan import HostOptions, Slots, Start
    from hpctrain.control.doctor import diagnosis as doctor_ranks
    from hpctrain.control.planning.place_hosts import PlacedHosts

    monkeypatch.setenv("PATH", fake_mpirun(tmp_path, HANGING))
    monkeypatch.setattr(doctor_ranks, "LIMIT_SECONDS", 1)
    hosts = PlacedHosts(slots=(Slots(host="localhost", slots=2),))
    (check,) = doctor_ranks.check_ranks(hosts, HostOptions(), Start(), tmp_path)
    assert (check.name, check.status) == ("ranks", "failed") and "1 s" in check.found
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "bin")], capture_output=True, text=True, check=False)
    assert left.stdout == ""
