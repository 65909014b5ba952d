"""Copies files to fast storage on the nodes of a job before its ranks start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from hpctrain.common.errors import HpctrainError
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.plan import Container
from hpctrain.common.settings import STAGE
from hpctrain.common.stderr import tell
from hpctrain.control.schedulers.profile import ClusterProfile

_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")


class StagedPaths(FrozenModel):
    """One copy, to ``name`` in the job's folder: archives are unpacked, folders and files are copied."""

    source: str = Field(description="absolute path on the shared file system")
    name: str
    kind: Literal["copy", "tar"]


class Staging(FrozenModel):
    """The copies that a job stages on its nodes.

    Attributes:
        folder: of the job on each node, with variables that the job has.
    """

    folder: str
    copies: tuple[StagedPaths, ...]

    @property
    def path(self) -> Path:
        """The folder in this job.

        Raises:
            HpctrainError: the job does not have the variable that it begins with.
        """
        path = os.path.expandvars(self.folder)
        if not path.startswith("/"):
            raise HpctrainError(
                "HT-job-storage-unusable",
                "node_storage in the profile: the job has no such place: {folder}",
                folder=path,
            )
        return Path(path)


def plan_staging(
    profile: ClusterProfile, sources: Sequence[Path], container: Container | None = None
) -> Staging | None:
    """The staging of a job on a cluster; None if there is nothing to stage.

    Args:
        sources: folders and files, archives of tar among them.

    Raises:
        HpctrainError: the cluster has no such storage, a source is not there, two have one name, or the container would
            not have them.
    """
    if not sources:
        return None
    if profile.node_storage is None:
        raise HpctrainError(
            "HT-profile-lacks-key",
            "--stage: the profile {profile} names no storage of the nodes",
            "add for example node_storage: /tmp to a profile of your own, and give it to --cluster",
            profile=profile.name,
        )
    copies: dict[str, StagedPaths] = {}
    for source in sources:
        copy = _staged(source)
        if copy.name in copies:
            raise HpctrainError(
                "HT-stage-source-not-usable",
                "--stage {source}: there would be two {name!r} in the job's folder",
                "rename one",
                source=source,
                name=copy.name,
            )
        copies[copy.name] = copy
    if container and container.runtime == "pyxis":
        raise HpctrainError(
            "HT-options-exclude-each-other",
            "--stage and --container exclude each other here: what is staged would not be in the container",
            "mount the source itself with --mount",
        )
    # Each job has a folder of its own, which no other files can be in and which the job can remove.
    folder = f"{profile.node_storage.rstrip('/')}/hpctrain-$SLURM_JOB_ID"
    return Staging(folder=folder, copies=tuple(copies.values()))


def _staged(source: Path) -> StagedPaths:
    # A link is followed, but the copy keeps the link's name.
    path, name = source.resolve(), Path(os.path.abspath(source)).name  # noqa: PTH100 - absolute() keeps ".."
    if not path.exists():
        raise HpctrainError(
            "HT-stage-source-not-usable",
            "--stage {source}: there is no such file or folder",
            f"looked for {path}",
            source=source,
        )
    for ending in _TAR:
        if path.is_file() and path.name.endswith(ending) and path.name != ending:
            return StagedPaths(source=str(path), name=name.removesuffix(ending), kind="tar")
    return StagedPaths(source=str(path), name=name, kind="copy")


def stage(staging: Staging, container: Container | None) -> dict[str, str]:
    """Copy what is staged to a new folder on each node, which only its owner may enter; returns the ranks' variables.

    Raises:
        HpctrainError: the nodes share the storage, or something cannot be copied.
    """
    folder = staging.path
    # What SIGKILL left behind.
    _on_each_node("rm", "-rf", "--", folder)
    if not _on_each_node("mkdir", "-m", "700", "--", folder):
        raise HpctrainError(
            "HT-job-storage-unusable",
            "node_storage in the profile must be a place that each node has for itself; {folder} is none",
            folder=folder,
        )
    for copy in staging.copies:
        if not _copy(copy, folder / copy.name):
            raise HpctrainError(
                "HT-job-staging-failed", "{source} was not copied to each node", exit_code=1, source=copy.source
            )
    variables = {STAGE.name: str(folder)}
    if container:
        bound = os.environ.get("APPTAINER_BIND")
        variables["APPTAINER_BIND"] = f"{bound},{folder}" if bound else str(folder)
    return variables


def remove_staged(staging: Staging) -> None:
    """Remove the job's folder from each node."""
    _on_each_node("rm", "-rf", "--", staging.path)


def _copy(copy: StagedPaths, to: Path) -> bool:
    if copy.kind == "copy":
        return _on_each_node("cp", "-a", "--", copy.source, to)
    return _on_each_node("mkdir", "--", to) and _on_each_node("tar", "-xf", copy.source, "-C", to)


def _on_each_node(*command: str | Path) -> bool:
    """Run a command once on each node of the job; whether it went well on all."""
    tasks = (f"--ntasks={os.environ['SLURM_JOB_NUM_NODES']}", "--ntasks-per-node=1")
    return run_here("srun", *tasks, *map(str, command))


def run_here(*command: str) -> bool:
    """Run a command to its end; whether it went well. One that cannot be started is named."""
    try:
        return subprocess.run(command, check=False).returncode == 0
    except OSError as error:
        tell(f"hpctrain: {command[0]}: {error.strerror}")
        return False


def look_at_image(container: Container) -> None:
    """Fetch an image that is an address once, instead of by every rank.

    Raises:
        HpctrainError: it cannot be fetched or run.
    """
    if container.runtime == "pyxis" or container.image.startswith("/"):
        return
    # Ranks that find it in the cache need not fetch and convert it all at a time.
    if not run_here("apptainer", "exec", container.image, "true"):
        raise HpctrainError(
            "HT-job-image-unusable", "the image {image}: apptainer cannot run it", image=container.image
        )
