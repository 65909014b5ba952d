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

# On 3 ranks one has no rows of a parameter with 4; the page says it below its table.
OTHERWISE_ON_3 = {
    "AdaShift": ["exact", "refused", "refused"],
    "AvaGrad": ["exact", "refused", "refused"],
    "StableAdamW": ["exact", "exact", "exact"],
}
# Of each kind of rule and of each reason one.
SOME = ["torch.optim.RMSprop", "torch.optim.Rprop", "torch.optim.ASGD", "torch.optim.Muon", "Lion", "Lamb", "Lookahead"]


def documented() -> dict[str, list[str]]:
    """What the page's table says of each optimizer: exact, refused or unstable, by kind of mesh."""
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
    ("ranks", "names"),
    [
        pytest.param(2, SOME, id="some"),
        pytest.param(2, None, id="all on 2", marks=pytest.mark.thorough),
        pytest.param(3, None, id="all on 3", marks=pytest.mark.thorough),
    ],
)
def test_as_the_page_says(mpirun, tmp_path, ranks, names):
    names = list(program.optimizers()) if names is None else names
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), "gloo", ";".join(names), timeout=1500)
    results = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(ranks)]
    said = documented() | (OTHERWISE_ON_3 if ranks == 3 else {})
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
    return "exact" if error <= 1e-10 else f"differs by {error}"
