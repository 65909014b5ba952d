"""The scripts in the README and on the pages run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from pages import scripts

# Those of other frameworks are run by test_frameworks.py.
SCRIPTS = {name: text for name, text in scripts().items() if name in ("digits_torch.py", "digits_keras.py")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_on_two_ranks_as_printed(hpctrain, tmp_path, name):
    pytest.importorskip("torch" if "torch" in name else "keras")
    (tmp_path / name).write_text(SCRIPTS[name])
    result = hpctrain("run", name, "-np", "2")
    assert result.returncode == 0, result.stdout
    assert _accuracy(result.stdout) > 0.95


def test_a_loss_divided_by_tokens_is_that_of_one_process(hpctrain, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "sentences.py").write_text(scripts()["sentences.py"])
    printed = []
    for ranks in ("1", "2"):
        result = hpctrain("run", "sentences.py", "-np", ranks)
        assert result.returncode == 0, result.stdout
        printed += re.findall(r"^loss (\d\.\d+)$", result.stdout, flags=re.MULTILINE)
    assert len(printed) == 2
    # Ten updates in float32.
    assert abs(float(printed[0]) - float(printed[1])) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize(("name", "lines"), [("digits_torch.py", 4), ("digits_keras.py", 5)])
def test_script_without_the_marked_lines_needs_no_hpctrain(tmp_path, name, lines):
    pytest.importorskip("torch" if "torch" in name else "keras")
    printed = SCRIPTS[name].splitlines()
    plain = [line for line in printed if not line.endswith("  #")]
    assert len(printed) - len(plain) == lines
    (tmp_path / "plain.py").write_text("import sys\nsys.modules['hpctrain'] = None\n" + "\n".join(plain))
    output = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=180
    ).stdout
    assert _accuracy(output) > 0.95


def _accuracy(output: str) -> float:
    found = re.search(r"^accuracy (\d\.\d+)$", output, flags=re.MULTILINE)
    assert found, output
    return float(found[1])
