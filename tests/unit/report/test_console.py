from __future__ import annotations

import io
import os

import pytest

from hpctrain.report.console import Console
from support.golden import check_text
from support.report.written_runs import typed_run


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    both = io.StringIO()
    with Console(both, both) as console:
        for event in typed_run():
            console.show(event)
    check_text("console", both.getvalue())


def test_results_go_to_stdout_and_progress_to_stderr() -> None:
    out, err = io.StringIO(), io.StringIO()
    line = "printed by [bold]rank 0[/bold]"
    with Console(out, err) as console:
        for event in typed_run():
            console.show(event)
        console.output(f"{line}\n")
    assert [each.split()[0] for each in out.getvalue().splitlines()] == ["epoch"] * 3 + ["printed"]
    assert out.getvalue().endswith(f"{line}\n")
    assert len(err.getvalue().splitlines()) == 2


def test_a_reader_that_left_does_not_stop_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    """As after ``| head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, Console(stdout) as console:
        for _ in range(3):
            console.output("printed by rank 0\n")
        console.show(typed_run()[-1])
    assert " 10.5 s" in capfd.readouterr().err


@pytest.mark.parametrize("bar", [False, True])
def test_a_lost_terminal_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch, bar: bool) -> None:
    """As after an ssh that broke: every write to it fails from then on."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal, Console(terminal, terminal) as console:
        for event in typed_run()[: 3 if bar else 0]:
            console.show(event)
        os.close(ours)
        console.notice("SIGHUP: waiting")
        for event in typed_run()[3:]:
            console.show(event)
        console.output("printed by rank 0\n")


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    out, err = _Terminal(), _Terminal()
    with Console(out, err) as console:
        for event in typed_run():
            if event.event == "end":
                console._bar.refresh()  # what its thread does ten times a second
            console.show(event)
            if event.event == "step" and event.iteration == 2:
                console.output("from [rank] 0\n")
    shown = err.getvalue()
    assert "epoch 3/3" in shown
    assert "12/12" in shown
    assert "128 samples/s" in shown
    # Both streams are one terminal, so the line goes above the bar, whole and without markup.
    assert "[rank] 0\n" in shown
    assert out.getvalue() == ""
    assert shown.endswith(" 10.5 s\n")


def test_a_ranks_output_is_passed_on_as_it_comes_on_a_terminal() -> None:
    terminal = _Terminal()
    with Console(terminal, terminal) as console:
        for text in ("10%", "\r20%", "\r30%"):
            console.output(text)
            assert terminal.getvalue().endswith(text)
        # It does not go into the open line.
        console.notice("SIGTERM")
        console.output("\r40%")
    assert terminal.getvalue() == "10%\r20%\r30%\nhpctrain: SIGTERM\n\r40%\n"
