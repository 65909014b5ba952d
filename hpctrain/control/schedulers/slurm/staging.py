"""Copies files to fast storage on the nodes of a job before its ranks start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpctrain.common.cluster.container import Container
from hpctrain.common.errors import HpctrainError
from hpctrain.common.frozen import FrozenModel
from hpctrain.control.schedulers.profile import ClusterProfile

if TYPE_CHECKING:
    from hpctrain.control.packing.pack import Pack

_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
_ENVIRONMENT = "environment"


class StagedPaths(FrozenModel):
    """One copy, to ``name`` in the job's folder: archives are unpacked, folders and files are copied."""

    source: str = Field(description="absolute path on the shared file system")
    name: str
    kind: Literal["copy", "tar", "zip"]


class Staging(FrozenModel):
    """The copies that a job stages on its nodes.

    Attributes:
        folder: of the job on each node, with variables that the job has.
        environment: of Python, that the ranks then use.
    """

    folder: str
    copies: tuple[StagedPaths, ...] = ()
    environment: StagedPaths | None = None


class PackedEnvironment(FrozenModel):
    """The archive of the environment that each node of a job unpacks and runs.

    Attributes:
        archive: its absolute path on the shared file system.
        digest: of its content; the name of its folder on a node.
        folder: of environments on each node, with a variable that the job has.
    """

    archive: str
    digest: str
    folder: str


def plan_pack(profile: ClusterProfile, container: Container | None = None) -> tuple[Pack, PackedEnvironment]:
    """The pack of this environment, and where the nodes of a cluster keep it. Writes nothing.

    Raises:
        HpctrainError: the cluster names no storage of its nodes, the ranks have the environment of a container, or
            this environment cannot be packed.
    """
    from hpctrain.control.packing.pack import find_pack

    if container:
        raise HpctrainError(
            "HT-options-exclude-each-other",
            "--pack and --container exclude each other: the ranks run the Python of the image",
            "an environment belongs in the image",
        )
    folder = f"{_storage(profile, '--pack')}/hpctrain-environments-{os.getuid()}"
    pack = find_pack()
    return pack, PackedEnvironment(archive=str(pack.archive), digest=pack.digest, folder=folder)


def _storage(profile: ClusterProfile, option: str) -> str:
    if profile.node_storage is None:
        raise HpctrainError(
            "HT-profile-lacks-key",
            "{option}: the profile {profile} names no storage of the nodes",
            "add for example node_storage: /tmp to a profile of your own, and give it to --cluster",
            option=option,
            profile=profile.name,
        )
    return profile.node_storage.rstrip("/")


def plan_staging(
    profile: ClusterProfile, sources: Sequence[Path], environment: Path | None, container: Container | None = None
) -> Staging | None:
    """The staging of a job on a cluster; None if there is nothing to stage.

    Args:
        sources: folders and files, archives among them.
        environment: a virtual environment's folder, or an archive of one.

    Raises:
        HpctrainError: the cluster has no such storage, a source is not there, two have one name, or the container would
            not have them.
    """
    if not sources and environment is None:
        return None
    storage = _storage(profile, "--stage")
    copies: dict[str, StagedPaths] = {}
    for source in sources:
        copy = _staged(source)
        if copy.name in copies or copy.name == _ENVIRONMENT:
            raise HpctrainError(
                "HT-stage-source-not-usable",
                "--stage {source}: there would be two {name!r} in the job's folder",
                "rename one",
                source=source,
                name=copy.name,
            )
        copies[copy.name] = copy
    staged = _staged(environment, option="--stage-environment", name=_ENVIRONMENT) if environment else None
    if staged and staged.kind == "copy" and not (Path(staged.source) / "bin" / "python").exists():
        raise HpctrainError(
            "HT-stage-source-not-usable",
            "--stage-environment {environment}: neither a folder with bin/python nor an archive of one",
            environment=environment,
        )
    if container and (staged or container.runtime == "pyxis"):
        raise HpctrainError(
            "HT-options-exclude-each-other",
            "--stage and --container exclude each other here: what is staged would not be in the container",
            "mount the source itself with --mount; an environment belongs in the image",
        )
    # Each job has a folder of its own, which no other files can be in and which the job can remove.
    folder = f"{storage}/hpctrain-$SLURM_JOB_ID"
    return Staging(folder=folder, copies=tuple(copies.values()), environment=staged)


def _staged(source: Path, *, option: str = "--stage", name: str | None = None) -> StagedPaths:
    # A link is followed, but the copy keeps the link's name.
    path, own = source.resolve(), Path(os.path.abspath(source)).name  # noqa: PTH100 - absolute() keeps ".."
    if not path.exists():
        raise HpctrainError(
            "HT-stage-source-not-usable",
            "{option} {source}: there is no such file or folder",
            f"looked for {path}",
            option=option,
            source=source,
        )
    for ending in (*_TAR, ".zip"):
        if path.is_file() and path.name.endswith(ending) and path.name != ending:
            kind: Literal["tar", "zip"] = "zip" if ending == ".zip" else "tar"
            return StagedPaths(source=str(path), name=name or own.removesuffix(ending), kind=kind)
    return StagedPaths(source=str(path), name=name or own, kind="copy")
