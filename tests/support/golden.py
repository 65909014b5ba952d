"""Texts for people as they were decided on, so that a test need not quote them."""

from __future__ import annotations

import os
from pathlib import Path

TEXTS = Path(__file__).parents[1] / "golden" / "texts"


def check_text(name: str, text: str) -> None:
    """Compare a text with the stored one of this name; ``REGENERATE=1`` stores it instead."""
    path, text = TEXTS / f"{name}.txt", text.rstrip("\n") + "\n"
    if os.environ.get("REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"if the change of {path.name} is meant, run this test with REGENERATE=1"
