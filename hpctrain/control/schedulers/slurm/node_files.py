"""What a job gives its nodes before the ranks start: copies of files, a packed environment, and a look at the image."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.common.cluster.container import Container
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_regular, sha256
from hpctrain.common.settings import STAGE
from hpctrain.common.stderr import tell
from hpctrain.control.schedulers.profiles import slurm_folder
from hpctrain.control.schedulers.slurm.staging import PackedEnvironment, StagedPaths, Staging

_MOST_BYTES = 2**16
_AGAIN = "hpctrain submit --pack makes it again"


def on_each_node(*command: str | Path) -> bool:
    """Run a command once on each node of the job; whether it went well on all."""
    return _srun(*command).returncode == 0


def _srun(*command: str | Path, output: int | None = None) -> subprocess.CompletedProcess[str]:
    tasks = (f"--ntasks={os.environ['SLURM_JOB_NUM_NODES']}", "--ntasks-per-node=1")
    return _run("srun", *tasks, *command, output=output)


def _run(*command: str | Path, output: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; one that cannot be started has the status that a shell gives it, and is named."""
    try:
        return subprocess.run([*map(str, command)], stdout=output, text=True, check=False)
    except OSError as error:
        tell(f"hpctrain: {command[0]}: {error.strerror}")
        return subprocess.CompletedProcess(command, 127, "")


def expanded(folder: str) -> Path:
    """A folder on the nodes, with the value of the variable that it may begin with.

    Raises:
        HpctrainError: the job does not have that variable.
    """
    path = os.path.expandvars(folder)
    if not path.startswith("/"):
        raise HpctrainError(
            "HT-job-storage-unusable", "node_storage in the profile: the job has no such place: {folder}", folder=path
        )
    return Path(path)


def stage(staging: Staging, container: Container | None) -> dict[str, str]:
    """Copy what is staged to a new folder on each node, which only its owner may enter; returns the ranks' variables.

    Raises:
        HpctrainError: the nodes share the storage, or something cannot be copied.
    """
    folder = expanded(staging.folder)
    # What SIGKILL left behind.
    on_each_node("rm", "-rf", "--", folder)
    if not on_each_node("mkdir", "-m", "700", "--", folder):
        raise HpctrainError(
            "HT-job-storage-unusable",
            "node_storage in the profile must be a place that each node has for itself; {folder} is none",
            folder=folder,
        )
    for copy in (*staging.copies, *filter(None, [staging.environment])):
        if not _copy(copy, folder / copy.name):
            raise HpctrainError(
                "HT-job-staging-failed", "{source} was not copied to each node", exit_code=1, source=copy.source
            )
    variables = {STAGE.name: str(folder)}
    if container:
        bound = os.environ.get("APPTAINER_BIND")
        variables["APPTAINER_BIND"] = f"{bound},{folder}" if bound else str(folder)
    return variables


def _copy(copy: StagedPaths, to: Path) -> bool:
    if copy.kind == "copy":
        return on_each_node("cp", "-a", "--", copy.source, to)
    return on_each_node("mkdir", "--", to) and on_each_node(*unpacking(copy, to))


def unpacking(archive: StagedPaths, to: Path) -> tuple[str, ...]:
    """The command that unpacks an archive into a folder."""
    if archive.kind == "tar":
        return ("tar", "-xf", archive.source, "-C", str(to))
    return ("unzip", "-q", archive.source, "-d", str(to))


def unpack(pack: PackedEnvironment, say: Callable[[str], None]) -> dict[str, str]:
    """Give each node the packed environment, once, as one file; returns the variables to start from it.

    With many ranks the import of a framework from a shared file system is slow. The nodes keep it for other jobs.

    Raises:
        HpctrainError: the archive is gone or damaged, or a node cannot have it; nodes say why themselves.
    """
    archive, environments = Path(pack.archive), expanded(pack.folder)
    facts = archive.with_name(archive.name.removesuffix(".tar.gz") + ".txt")
    try:
        digest, *sizes = read_regular(facts, _MOST_BYTES).decode().split()
        packed, unpacked = map(int, sizes)
        archive.stat()
    except (OSError, ValueError) as error:
        raise HpctrainError(
            "HT-job-pack-gone",
            "{archive} is gone, or {host} does not see it",
            f"{_AGAIN}, in XDG_CACHE_HOME",
            archive=archive,
            host=socket.gethostname(),
        ) from error
    # An archive that is used is kept, where this job may say so.
    with contextlib.suppress(OSError):
        os.utime(archive)
        os.utime(facts)
    script = read_regular(slurm_folder() / "on_node.sh", _MOST_BYTES).decode()
    node = ("bash", "-c", script, "bash")
    found = _srun(*node, "find", environments, pack.digest, str(packed + unpacked), output=subprocess.PIPE)
    if found.returncode:
        raise _not_there(pack)
    if not found.stdout.strip():
        say("hpctrain: each node has the environment already")
    else:
        _send(pack, environments, digest, node, say)
    place = environments / pack.digest
    return {"VIRTUAL_ENV": str(place), "PATH": f"{place}/bin:{os.environ['PATH']}"}


def _send(
    pack: PackedEnvironment, environments: Path, digest: str, node: tuple[str, ...], say: Callable[[str], None]
) -> None:
    archive, sent = Path(pack.archive), environments / f".sent-{os.environ['SLURM_JOB_ID']}"
    begin = time.monotonic()
    if _run("sbcast", "--force", archive, sent).returncode:
        on_each_node("rm", "-f", "--", sent)
        raise _not_there(pack, f"sbcast could not send {archive} to {sent} on each node")
    arrived = time.monotonic()
    if not on_each_node(*node, "unpack", environments, pack.digest, digest, sent):
        if sha256(archive)[0] == digest:
            raise _not_there(pack)
        archive.unlink(missing_ok=True)
        archive.with_name(archive.name.removesuffix(".tar.gz") + ".txt").unlink(missing_ok=True)
        raise _not_there(pack, f"{archive} was damaged, and is removed; {_AGAIN}")
    seconds = (round(arrived - begin), round(time.monotonic() - arrived))
    say("hpctrain: the environment was sent to each node in {} s, and unpacked in {} s".format(*seconds))


def _not_there(pack: PackedEnvironment, why: str = "a node says why, above") -> HpctrainError:
    return HpctrainError(
        "HT-job-pack-not-on-nodes", "the environment is not on each node: {reason}", exit_code=1, reason=why
    )


def look_at_image(container: Container) -> None:
    """Say once what is wrong with the ranks' container, instead of by every rank; fetch an image that is an address.

    Raises:
        HpctrainError: the image cannot be read or fetched, or srun has no Pyxis.
    """
    if container.runtime == "pyxis":
        options = _run("srun", "--help", output=subprocess.PIPE).stdout
        if "--container-image" in options:
            return
        why = "srun has no --container-image: Pyxis is not installed on this cluster"
    elif not container.image.startswith("/"):
        # Ranks that find it in the cache need not fetch and convert it all at a time.
        if _run("apptainer", "exec", container.image, "true").returncode == 0:
            return
        why = "apptainer cannot run it"
    elif os.access(container.image, os.R_OK):
        return
    else:
        why = "it cannot be read"
    raise HpctrainError("HT-job-image-unusable", "the image {image}: {reason}", image=container.image, reason=why)
