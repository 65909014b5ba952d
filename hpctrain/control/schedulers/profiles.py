"""The shipped cluster profiles, and those in users' files."""

from __future__ import annotations

from pathlib import Path

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import LONGEST_FILE, load_checked
from hpctrain.common.files.regular import read_text
from hpctrain.control.schedulers.profile import ClusterProfile

_PACKAGE = Path(__file__).parents[2]


def slurm_folder() -> Path:
    """The folder of job script templates and ``clusters/``: ``hpctrain/slurm`` in a wheel, ``slurm`` in a checkout.

    Raises:
        HpctrainError: neither is there.
    """
    places = (_PACKAGE / "slurm", _PACKAGE.parent / "slurm")
    for place in places:
        if (place / "clusters").is_dir():
            return place
    raise HpctrainError(
        "HT-profile-folder-missing",
        "hpctrain's Slurm templates and cluster profiles are in neither {packaged} nor {checkout}",
        "install hpctrain again",
        packaged=places[0],
        checkout=places[1],
    )


def profile_names() -> list[str]:
    """The names of the shipped profiles."""
    return sorted(path.stem for path in (slurm_folder() / "clusters").glob("*.yaml"))


def load_profile(name_or_path: str) -> ClusterProfile:
    """Load a shipped profile by its name, or any profile by its path.

    Args:
        name_or_path: a name of :func:`profile_names`, or a path (it holds a slash or ends in .yaml or .yml).

    Raises:
        HpctrainError: no such profile, or something in it that the schema refuses; names the file, the line and the
            key.
    """
    path = _find(name_or_path)
    hint = f"the shipped profiles go by their name: {', '.join(profile_names())}"
    text = read_text(path, "cluster profile", hint, limit=LONGEST_FILE)
    example = slurm_folder() / "clusters" / "generic.yaml"
    return load_checked(text, path, ClusterProfile, "cluster profile", f"{example} shows one")


def _find(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    names = profile_names()
    if name_or_path not in names:
        raise HpctrainError(
            "HT-choice-unknown",
            "unknown cluster {cluster!r}",
            f"{nearest(name_or_path, names)}; or auto to discover the one at hand, or the path of a .yaml file",
            cluster=name_or_path,
        )
    return slurm_folder() / "clusters" / f"{name_or_path}.yaml"
