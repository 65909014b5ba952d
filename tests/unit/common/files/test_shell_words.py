"""Names of files in printed commands: a shell makes of them what they were."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, resume_command


def words_in_bash(command: str) -> list[str]:
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    return [os.fsdecode(word) for word in shown.stdout.split(b"\0")[:-1]]


def test_a_shell_reads_every_name_back_and_takes_none_for_an_option():
    names = ["-lead", "x\udcffy", "it's", "a b", "\x1b[2J", "a\nb", "\\", "$HOME", "ä", "\udcff'\\", "~", ""]
    words = [shell_word(name) for name in names]
    assert not any(word.startswith("-") for word in words)
    assert words_in_bash(" ".join(words)) == ["./-lead", *names[1:]]


def test_the_command_that_resumes_a_run_of_any_name_can_be_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("-lead", "x\udcffy"):
        *_, folder = words_in_bash(resume_command(RunDirectory(Path(name))))
        Path(folder).mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["-lead", "x\udcffy"]
