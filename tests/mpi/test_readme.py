"""The README's scripts run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SCRIPTS = dict(re.findall(r"<!-- (\w+\.py) -->\n```python\n(.*?)```", README.read_text(), flags=re.DOTALL))


def test_there_is_a_script_for_each_framework():
    assert set(SCRIPTS) == {"digits_torch.py", "digits_keras.py"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_on_two_ranks_as_printed(hpctrain, tmp_path, name):
    pytest.importorskip("torch" if "torch" in name else "keras")
    (tmp_path / name).write_text(SCRIPTS[name])
    result = hpctrain("run", name, "-np", "2")
    assert result.returncode == 0, result.stdout
    accuracy = re.search(r"^accuracy (\d\.\d+)$", result.stdout, flags=re.MULTILINE)
    assert accuracy and float(accuracy[1]) > 0.95, result.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_differs_by_the_marked_lines_only(name):
    added = [line for line in SCRIPTS[name].splitlines() if line.endswith("  #") and "import" not in line]
    assert 0 < len(added) <= 5
