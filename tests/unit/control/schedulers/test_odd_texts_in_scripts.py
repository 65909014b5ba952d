"""Any text arrives unchanged where a job script hands it on, and nothing else is executed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.common.run.plan import Container
from hpctrain.control.schedulers.slurm.slurm_scheduler import directive
from support.schedulers.fake_programs import Programs
from support.schedulers.job_scripts import PLAIN, script

# What means something to a shell, often, among everything else that a variable or a path can hold.
_COMMANDS = ("$(touch pwned)", "`touch pwned`", "'; touch pwned; '")
_SPECIAL = st.sampled_from([*" '\"\\$`;|&<>(){}[]*?!#~%=-\n\t\r", *_COMMANDS])
_ANY = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.lists(st.one_of(_SPECIAL, _ANY), max_size=20).map("".join)
# As long as file systems allow, in bytes.
NAME = TEXT.filter(lambda text: text not in ("", ".", "..") and "/" not in text and len(text.encode()) < 200)
LINE = TEXT.filter(lambda text: not any(mark in text for mark in [*map(chr, range(32)), *"\x7f\x85\u2028\u2029"]))
WORD = LINE.filter(lambda text: text and not text.startswith("-") and not any(map(str.isspace, text)))


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(run=NAME, folder=NAME, value=TEXT, module=WORD, image=NAME, name=TEXT)
def test_any_text_arrives(run: str, folder: str, value: str, module: str, image: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place).resolve()
        programs = Programs(root / "bin")
        work, image_file = root / "f" / folder, root / "i" / image
        for made in (programs.folder, work, root / "i", root / run):
            made.mkdir(parents=True, exist_ok=True)
        image_file.touch()
        programs.add("module")
        programs.add("hpctrain", "print('trained')")
        profile = PLAIN.model_copy(update={"environment": {"VALUE": value}, "modules": (module,)})
        more = {
            "run_dir": root / run,
            "folder": work,
            "container": Container(runtime="apptainer", image=str(image_file)),
        }
        text = script(profile, name or "x", more=more)
        output, _ = programs.start(text, TMPDIR=str(root)).communicate(timeout=60)
        assert output == "trained\n"
        (call,) = programs.calls("hpctrain")
        assert call.arguments == ["run", "--resume", "--run-dir", str(root / run)]
        assert call.environment["VALUE"] == value
        assert call.environment["PWD"] == str(work)
        assert [each.arguments for each in programs.calls("module")] == [["purge"], ["load", module]]
        assert not [*root.rglob("pwned")]


@given(value=LINE)
def test_a_directive_is_one_comment_for_bash(value: str) -> None:
    line = directive("job-name", value)
    assert "\n" not in line
    assert line.startswith("#SBATCH --job-name=")
