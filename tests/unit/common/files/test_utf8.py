"""Names that are not UTF-8 can be written where only UTF-8 can be read."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from hpctrain.common.files.printable import encodable, json_text

ANY_CHARACTER = st.text(st.characters(exclude_categories=()) | st.sampled_from('\\u"d89abcf\udcff\ud83d\ude00\0'))


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


@given(st.dictionaries(ANY_CHARACTER, ANY_CHARACTER, max_size=3))
def test_a_strict_reader_gets_the_encodable_text(values: dict[str, str]) -> None:
    # What json.dumps writes as a pair is one character to every reader, two surrogates in Python.
    paired = json.loads(json.dumps(values))
    assert from_json(json_text(values)) == {encodable(key): encodable(value) for key, value in paired.items()}
