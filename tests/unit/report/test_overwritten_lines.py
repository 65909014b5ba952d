"""Progress bars become lines where nothing can be drawn over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.report.output import Lines


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bar_is_one_line_a_second_and_its_end() -> None:
    clock = Clock()
    lines, got = Lines(clock=clock), []
    for step in range(1, 31):
        clock.now += 0.1
        got += lines.add(f"\r{step:2}/30 [{'#' * step}]")
    # As tqdm leaves it.
    got += lines.add("\n")
    assert [line.split()[0] for line in got] == ["1/30", "11/30", "21/30", "30/30"]
    assert lines.rest() == []


def test_keras_goes_back_by_backspaces_and_returns() -> None:
    clock = Clock()
    lines, got = Lines(clock=clock), []
    for step in range(1, 4):
        clock.now += 2
        got += lines.add(f"\b\b\b\b\b\r{step}/3 loss")
    got += lines.add("\n")
    assert got == ["1/3 loss", "2/3 loss", "3/3 loss"]


@given(st.lists(st.text("ab\n", max_size=20)))
def test_text_without_bars_is_kept(parts: list[str]) -> None:
    lines = Lines()
    got = [line for part in parts for line in lines.add(part)]
    text = "".join(parts)
    assert got + lines.rest() == text.removesuffix("\n").split("\n") * bool(text) or (text == "" and not got)


@given(st.lists(st.text("ab\r\n\b ", max_size=20)))
def test_the_last_state_of_every_line_is_shown_however_it_comes(parts: list[str]) -> None:
    lines = Lines(clock=lambda: 0.0)
    got = [line for part in parts for line in lines.add(part)] + lines.rest()
    whole = [line for line in Lines(clock=lambda: 0.0).add("".join(parts) + "\n") if line]
    assert [line for line in whole if line not in got] == []


def test_output_without_line_breaks_does_not_fill_the_memory() -> None:
    lines = Lines(longest=100)
    got = [line for _ in range(50) for line in lines.add("x" * 30)]
    assert len(got) == 12 and all(len(line) <= 130 for line in got)
    assert len("".join(got + lines.rest())) == 1500


def test_a_line_that_was_a_bar_once_does_not_fill_the_memory_either() -> None:
    lines = Lines(longest=1000, clock=lambda: 0.0)
    lines.add("12%\r")
    for _ in range(2000):
        lines.add("x" * 1000)
    assert sum(map(len, lines.rest())) <= 2000
