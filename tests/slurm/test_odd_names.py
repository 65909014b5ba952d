"""Names with blanks, quotes, line breaks and commands in them, on a real Slurm: they arrive, and execute nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RUNS
from support.launching import Launch
from support.slurm.local_slurm import LocalSlurm

ODD = 'it\'s "x"\na  b\\n $(touch pwned); `touch pwned`; #1 %j é中'
SHOW = """
import json, os, sys
with open(os.environ["SEEN"], "w") as file:
    json.dump([sys.argv[1:], os.environ["ODD"], os.environ["SLURM_JOB_NAME"]], file)
"""


@pytest.mark.long
def test_it_arrives(slurm: LocalSlurm, slurm_main: Launch, tmp_path: Path) -> None:
    text = ODD
    folder = tmp_path / text
    folder.mkdir()
    (folder / f"{text}.py").write_text(SHOW)
    # Slurm itself cannot have these two in the path of a log.
    run, seen = tmp_path / re.sub(r"[%\\]", "", f"run {text}"), tmp_path / "seen"
    options = ["--cluster", "generic", "--time", "5", "--run-dir", str(run)]
    options += ["--env", f"ODD={text}", "--env", f"SEEN={seen}", "--wait"]
    done = slurm_main("submit", str(folder / f"{text}.py"), *options, "--", text)
    logs = "".join(log.read_text() for log in run.glob("logs/*"))
    assert done.returncode == 0, done.stdout + logs
    arguments, variable, name = json.loads(seen.read_text())
    assert (arguments, variable) == ([text], text)
    # A name of a job is one line.
    assert name == re.sub("\n", " ", text)
    assert [path.name for path in run.glob("logs/job-*.log")]
    assert not [*tmp_path.rglob("pwned")]


def test_a_recipes_name(slurm: LocalSlurm, slurm_main: Launch, tmp_path: Path) -> None:
    """It is in the plan, and in the default directory's name; the script has none of it."""
    shown = slurm_main("recipes", "show", "digits").stdout
    recipe = tmp_path / "odd.yaml"
    name = "x'; touch pwned; $(touch pwned) \""
    recipe.write_text(re.sub(r"^name: .*$", lambda _: f"name: {json.dumps(name)}", shown, flags=re.MULTILINE))
    done = slurm_main("submit", str(recipe), "--cluster", "generic", "--time", "5", "--sbatch", "hold")
    assert done.returncode == 0, done.stdout
    (run,) = (tmp_path / RUNS).iterdir()
    assert json.loads((run / "plan.json").read_text())["recipe"]["name"] == name
    assert run.name.startswith("x'; touch pwned; $(touch pwned) \"")
    slurm.run("scancel", *json.loads((run / "submission.json").read_text())["jobs"])
