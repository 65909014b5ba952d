"""Every optimizer of PyTorch and pytorch_optimizer gives the numbers of one process, or is refused, as documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

pytest.importorskip("pytorch_optimizer")

PROGRAM = Path(__file__).parent / "programs" / "optimizers.py"
PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
program = imported(PROGRAM)

# Of each kind of rule and of each reason one.
SOME = ["torch.optim.RMSprop", "torch.optim.Rprop", "torch.optim.ASGD", "torch.optim.Muon", "Lion", "Lamb", "Lookahead"]


def documented() -> dict[str, list[str]]:
    """What the page's table says of each optimizer by kind of mesh: exact, differs, fails, refused or unstable."""
    said = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] in {"exact", "refused", "unstable", "fails"}:
            said.update(dict.fromkeys(re.findall(r"`([^`]+)`", cells[3]), cells[:3]))
    return said


def test_the_page_has_them_all():
    assert documented().keys() == program.optimizers().keys()


@pytest.mark.long
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some"),
        pytest.param(None, id="all", marks=pytest.mark.thorough),
    ],
)
def test_as_the_page_says(mpirun, tmp_path, names):
    names = list(program.optimizers()) if names is None else names
    mpirun(PROGRAM, 2, str(tmp_path / "out"), "gloo", ";".join(names), timeout=1500)
    results = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(2)]
    said = documented()
    for name in names:
        wanted = program.reference(name)
        for kind, expected in zip(program.KINDS, said[name], strict=True):
            for found in (each[f"{name}/{kind}"] for each in results):
                assert _judged(found, wanted) == expected or expected == "unstable", (name, kind, found, wanted)


def _judged(found: list[list[float]] | str, wanted: list[list[float]] | str) -> str:
    if isinstance(found, str):
        return "refused" if found.startswith("refused: ") else "fails"
    if isinstance(wanted, str):
        return "trained, unlike one process"
    error = max(np.abs(np.subtract(one, other)).max() for one, other in zip(found, wanted, strict=True))
    return "exact" if error <= 1e-10 else "differs"
