"""What a job script and its nodes do with a packed environment, with stand-ins for Slurm and for the environment."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpctrain.control.schedulers.profiles import slurm_folder
from hpctrain.control.schedulers.slurm.staging import PackedEnvironment
from support.schedulers.fake_programs import ON_EACH_NODE, Programs, end, slurm_programs
from support.schedulers.job_scripts import PLAIN, script

SBCAST = "import shutil\nshutil.copy(*sys.argv[2:])"


def told(what: str, where: str | Path, output: str) -> bool:
    """Whether this host says this of a place."""
    said = [line for line in output.splitlines() if f"{socket.gethostname()}: " in line and what in line]
    return any(str(where) in line for line in said)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    made = slurm_programs(tmp_path / "bin")
    made.add("srun", ON_EACH_NODE)
    made.add("sbcast", SBCAST)
    # The one that the job itself is; the packed one goes before it.
    made.add("hpctrain")
    return made


def packed_job(directory: Path, **asked: Any) -> str:
    """A job with an environment whose Python says that it runs, and whose hpctrain fails."""
    made = directory / "made"
    (made / "bin").mkdir(parents=True)
    (made / "lib").mkdir()
    (made / "lib" / "small.py").touch()
    (made / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    for name, does in (("python", ""), ("hpctrain", 'echo "started $0 $VIRTUAL_ENV"; exit 1')):
        (made / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (made / "bin" / name).chmod(0o700)
    archive = directory / "it's packed.tar.gz"
    subprocess.run(["tar", "-czf", str(archive), "-C", str(made), "."], check=True)
    own = hashlib.sha256(archive.read_bytes()).hexdigest()
    (directory / "it's packed.txt").write_text(f"{own} {archive.stat().st_size} 10240\n")
    pack = PackedEnvironment(archive=str(archive), digest="d1", folder=f"$TMPDIR/environments-{os.getuid()}")
    more = {"run_directory": directory, "folder": directory, "pack": pack}
    return script(PLAIN, **{"nodes": 2, **asked}, more=more)


def end_packed(programs: Programs, text: str, storage: Path) -> tuple[int, str]:
    storage.mkdir(exist_ok=True)
    return end(programs, text, TMPDIR=str(storage), SLURM_JOB_NUM_NODES="2")


def test_a_packed_environment_is_sent_once_and_started_from(programs: Programs, tmp_path: Path) -> None:
    text, storage = packed_job(tmp_path), tmp_path / "node's own"
    environments = storage / f"environments-{os.getuid()}"
    code, output = end_packed(programs, text, storage)
    assert f"started {environments}/d1/bin/hpctrain {environments}/d1\n" in output
    assert len(programs.calls("sbcast")) == code == 1
    assert f"home = {environments}/d1/base/bin\n" in (environments / "d1" / "pyvenv.cfg").read_text()
    assert sorted(path.name for path in environments.iterdir()) == [".lock", "d1"]
    assert environments.stat().st_mode & 0o777 == 0o700
    # Another one that nothing has used for long goes when there is a new one; one that something runs from stays.
    program = environments / "runs" / "sleep"
    program.parent.mkdir()
    shutil.copy("/bin/sleep", program)
    (environments / "old").mkdir()
    with subprocess.Popen([str(program), "60"]) as running:
        for name in ("old", "runs"):
            os.utime(environments / name, (0, 0))
        code, output = end_packed(programs, text, storage)
        assert len(programs.calls("sbcast")) == 1
        assert {path.name for path in environments.iterdir()} == {".lock", "d1", "old", "runs"}
        (environments / "d1" / "pyvenv.cfg").unlink()
        shutil.rmtree(environments / "d1")
        end_packed(programs, text, storage)
        running.kill()
    assert {path.name for path in environments.iterdir()} == {".lock", "d1", "runs"}
    assert len(programs.calls("sbcast")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"array": "0-1"}, {"chain": 2}, {"nodes": 1}])
def test_arrays_chains_and_single_nodes_start_from_packed_environments(
    programs: Programs, tmp_path: Path, asked: dict[str, Any]
) -> None:
    programs.add("scancel")
    text, storage = packed_job(tmp_path, **asked), tmp_path / "storage"
    storage.mkdir()
    (tmp_path / "chain").write_text("7\n8\n")
    nodes = str(asked.get("nodes", 2))
    ids = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    code, output = end(programs, text, TMPDIR=str(storage), SLURM_JOB_NUM_NODES=nodes, **ids)
    assert code == 1
    assert f"started {storage}/environments-{os.getuid()}/d1/bin/hpctrain" in output


def test_an_environment_from_which_files_were_removed_is_made_again(programs: Programs, tmp_path: Path) -> None:
    """As clusters clean their temporary folders, also where a link leads there. What Python wrote does not count."""
    text, storage = packed_job(tmp_path), tmp_path / "storage"
    end_packed(programs, text, storage)
    made = storage / f"environments-{os.getuid()}" / "d1"
    (made / "bin" / "__pycache__").mkdir()
    (made / "lib" / "small.py").unlink()
    code, output = end_packed(programs, text, storage)
    assert len(programs.calls("sbcast")) == 2
    assert (made / "lib" / "small.py").exists()
    assert sorted(path.name for path in made.parent.iterdir()) == [".lock", "d1"]
    (made / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    code, output = end_packed(programs, text, storage)
    assert (code, f": {made}/bin/python" in output, "started" in output) == (1, True, False)


def test_what_a_killed_job_left_on_a_node_goes(programs: Programs, tmp_path: Path) -> None:
    text, storage = packed_job(tmp_path), tmp_path / "storage"
    environments = storage / f"environments-{os.getuid()}"
    end_packed(programs, text, storage)
    for left in (".new", ".old"):
        (environments / left / "part").mkdir(parents=True)
    for sent in (".sent-1", ".sent-2"):
        (environments / sent).touch()
    os.utime(environments / ".sent-1", (0, 0))
    end_packed(programs, text, storage)
    assert len(programs.calls("sbcast")) == 1
    assert sorted(path.name for path in environments.iterdir()) == [".lock", ".sent-2", "d1"]


def test_two_jobs_that_unpack_at_once_on_a_node_take_turns(programs: Programs, tmp_path: Path) -> None:
    packed_job(tmp_path)
    programs.add("tar", f"time.sleep(1)\nos.execv({shutil.which('tar')!r}, sys.argv)")
    archive, environments = tmp_path / "it's packed.tar.gz", tmp_path / "environments"
    environments.mkdir()
    command = ["bash", str(slurm_folder() / "on_node.sh"), "unpack", str(environments)]
    jobs = []
    for number in range(2):
        sent = shutil.copy(archive, environments / f".sent-{number}")
        own = [*command, "d1", hashlib.sha256(archive.read_bytes()).hexdigest(), str(sent)]
        jobs.append(subprocess.Popen(own, env=programs.environment))
    assert [job.wait(30) for job in jobs] == [0, 0]
    assert len(programs.calls("tar")) == 1
    assert sorted(path.name for path in environments.iterdir()) == [".lock", "d1"]


def test_what_runs_from_an_environment_is_found_through_links(programs: Programs, tmp_path: Path) -> None:
    text, storage = packed_job(tmp_path), tmp_path / "storage"
    (tmp_path / "disk").mkdir()
    storage.symlink_to("disk")
    program = tmp_path / "disk" / f"environments-{os.getuid()}" / "runs" / "sleep"
    program.parent.mkdir(parents=True)
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([str(program), "60"]) as running:
        os.utime(program.parent, (0, 0))
        end_packed(programs, text, storage)
        running.kill()
    assert program.exists()


def test_an_environment_that_cannot_be_unpacked_leaves_nothing(programs: Programs, tmp_path: Path) -> None:
    """As on a full disk."""
    programs.add("tar", "os.makedirs(sys.argv[4] + '/part')\nsys.exit('tar: No space left on device')")
    text, storage = packed_job(tmp_path), tmp_path / "storage"
    code, output = end_packed(programs, text, storage)
    assert (code, "started" in output) == (1, False)
    assert told("cannot be", storage, output)
    assert [path.name for path in (storage / f"environments-{os.getuid()}").iterdir()] == [".lock"]


def test_a_damaged_archive_is_removed_so_that_it_is_made_again(programs: Programs, tmp_path: Path) -> None:
    text, archive = packed_job(tmp_path), tmp_path / "it's packed.tar.gz"
    content = bytearray(archive.read_bytes())
    content[-1] ^= 1
    archive.write_bytes(content)
    code, output = end_packed(programs, text, tmp_path / "storage")
    assert (code, f"{archive} was damaged" in output) == (1, True)
    assert not archive.exists()
    assert not (tmp_path / "it's packed.txt").exists()


def test_an_environment_that_does_not_arrive_ends_the_job(programs: Programs, tmp_path: Path) -> None:
    programs.add("sbcast", f"{SBCAST}\nopen(sys.argv[3], 'ab').write(b'0')")
    text, storage = packed_job(tmp_path), tmp_path / "storage"
    code, output = end_packed(programs, text, storage)
    assert (code, "started" in output) == (1, False)
    assert told("not arrive", "", output)
    assert "was damaged" not in output
    programs.add("sbcast", "sys.exit('REQUEST_FILE_BCAST(n2): No space left on device')")
    code, output = end_packed(programs, text, storage)
    assert (code, "started" in output) == (1, False)
    assert "(n2): " in output
    assert "sbcast could" in output
    (tmp_path / "it's packed.txt").write_text(f"{'0' * 64} {1 << 60} 1\n")
    code, output = end_packed(programs, text, storage)
    assert (code, told("no space", storage, output)) == (1, True)
    (tmp_path / "it's packed.txt").unlink()
    code, output = end_packed(programs, text, storage)
    assert code == 2
    assert f"or {socket.gethostname()} does" in output and "submit --pack" in output


def test_environments_of_somebody_else_are_not_run(programs: Programs, tmp_path: Path) -> None:
    text, storage = packed_job(tmp_path), tmp_path / "storage"
    (tmp_path / "theirs").mkdir()
    storage.mkdir()
    (storage / f"environments-{os.getuid()}").symlink_to(tmp_path / "theirs")
    code, output = end_packed(programs, text, storage)
    assert (code, "somebody else" in output, "started" in output) == (1, True, False)
