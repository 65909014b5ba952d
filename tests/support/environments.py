"""Virtual environments as users have them, made of what is installed here."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

_CHECKOUT = Path(__file__).parents[2]


def linked_environment(place: Path, *requirements: str) -> Path:
    """An environment with some requirements and all that they need, as links to this one's files, and hpctrain as an
    editable installation of this checkout; returns its Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin" / "python"
    (site,) = place.glob("lib/python3.*/site-packages")
    for distribution in _closure([Requirement(each) for each in requirements]):
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file))).resolve()
            target = Path(site, file).resolve()
            # What is installed of hpctrain here refers to a checkout, perhaps another one.
            own = distribution.name == "hpctrain" and ".dist-info" not in str(file)
            if source.is_file() and not own and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(source)
    # As the build backend calls it.
    (site / "_editable_impl_hpctrain.pth").write_text(f"{_CHECKOUT}\n")
    script = place / "bin" / "hpctrain"
    script.write_text(f"#!{python}\nimport sys\nfrom hpctrain.cli.main import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return python


def _closure(wanted: list[Requirement]) -> Iterator[importlib.metadata.Distribution]:
    """The distributions that requirements name, and those that these need, each once."""
    seen = set()
    while wanted:
        requirement = wanted.pop()
        for extra in requirement.extras or {""}:
            if (requirement.name.lower(), extra) in seen:
                continue
            seen.add((requirement.name.lower(), extra))
            distribution = importlib.metadata.distribution(requirement.name)
            yield distribution
            for each in map(Requirement, distribution.requires or ()):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    wanted.append(each)
