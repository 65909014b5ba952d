"""Names of files in printed commands: a shell makes of them what they were."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, resume_command

_NAMES = st.binary(min_size=1, max_size=12).filter(lambda name: b"\0" not in name).map(os.fsdecode)


def words_in_bash(command: str) -> list[str]:
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    return [os.fsdecode(word) for word in shown.stdout.split(b"\0")[:-1]]


@settings(max_examples=20)
@given(st.lists(_NAMES, min_size=20, max_size=40))
@example(["-lead", "x\udcffy", "it's", "a b", "\x1b[2J", "\udcff1", "a\nb", "\\", "$HOME", "ä", "\udcff'\\", "~", ""])
def test_a_shell_reads_every_name_back_and_takes_none_for_an_option(names):
    words = [shell_word(name) for name in names]
    assert all(word.isprintable() for word in words)
    assert not any(word.startswith("-") for word in words)
    expected = [f"./{name}" if name.startswith("-") else name for name in names]
    assert words_in_bash(" ".join(words)) == expected


def test_the_command_that_resumes_a_run_of_any_name_can_be_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("-lead", "x\udcffy"):
        *_, folder = words_in_bash(resume_command(RunDirectory(Path(name))))
        Path(folder).mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["-lead", "x\udcffy"]
