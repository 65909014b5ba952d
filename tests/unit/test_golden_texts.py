"""Each stored text belongs to a test."""

from __future__ import annotations

from pathlib import Path

from support.golden import TEXTS

TESTS = Path(__file__).parents[1]


def test_every_text_has_its_test() -> None:
    sources = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert [path.name for path in TEXTS.iterdir() if f'check_text("{path.stem}", ' not in sources] == []
