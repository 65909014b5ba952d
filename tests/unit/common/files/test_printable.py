"""What others wrote cannot control the terminal on which it is shown, and is written where only UTF-8 can be read."""

from __future__ import annotations

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json
from rich.console import Console

from hpctrain.common.files.printable import dotted, encodable, json_text, printable
from hpctrain.report.output import answer, table, tell

_HOSTILE = "a\x1b]0;title\x07b\x9b2J\u202ec\r"


@given(st.text() | st.text(st.characters(categories=["Cs", "Cc", "Cf"])))
def test_nothing_of_it_is_a_control_character(text: str) -> None:
    shown = printable(text)
    # Standard output takes it.
    shown.encode(errors="surrogateescape")
    assert all(each.isprintable() or each in "\n\t" or not each.isascii() for each in shown)
    assert not {*map(chr, range(0x7F, 0xA0)), "\u202e", "\x1b"} & set(shown)


def test_answers_remarks_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    answer(_HOSTILE)
    tell(_HOSTILE)
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(table(["a"], [[_HOSTILE]], title=_HOSTILE))
    printed = capsys.readouterr()
    assert printed.out == printed.err == "a\\u001b]0;title\\u0007b\\u009b2J\\u202ec\\u000d\n"
    shown = console.file.getvalue()
    assert not any(each in shown for each in ("\x1b]", "\x07", "\x9b", "\u202e", "\r"))


def test_keys_of_others_are_not_repeated_at_any_length() -> None:
    assert dotted(["recipe", 3, "batch"]) == "recipe.3.batch"
    assert len(dotted(["x" * 10**6, "batch"])) < 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train\udcff.py", "train\\udcff.py"),
        ("\ud83d", "\\ud83d"),
        ("\udcff\ud83d\\\udcff", "\\udcff\\ud83d\\\\udcff"),
        ("a \\udcff that was typed", "a \\udcff that was typed"),
        ("naïve 😀", "naïve 😀"),
    ],
)
def test_lone_surrogates_are_written_out(text: str, shown: str) -> None:
    assert encodable(text) == shown
    assert from_json(json_text([text])) == [shown]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_has_no_number_that_is_not_finite(indent: int | None) -> None:
    text = json_text({"a": math.nan, "b": [math.inf, (-math.inf, 1.5)], "c": "NaN"}, indent=indent)
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, [None, 1.5]], "c": "NaN"}
