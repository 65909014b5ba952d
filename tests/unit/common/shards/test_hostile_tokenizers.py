"""A tokenizer.json that somebody else made: the library panics and raises; a sentence names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards.text.prepare import Preparation, prepare_text
from hpctrain.common.shards.text.tokenizer import open_tokenizer
from support.refusals import refused

tokenizers = pytest.importorskip("tokenizers")
_END = "<|endoftext|>"
_WORDS = {"type": "WordLevel", "vocab": {"a": 0, _END: 1, "[UNK]": 2}, "unk_token": "[UNK]"}


def _unigram(*vocabulary: Any, unknown: int | None) -> dict[str, Any]:
    return {"type": "Unigram", "vocab": list(vocabulary), "unk_id": unknown, "byte_fallback": False}


def _split(**keys: Any) -> dict[str, Any]:
    return {"behavior": "Removed", "invert": False, "type": "Split", **keys}


_PARTS: dict[str, dict[str, Any]] = {
    "a table of characters that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "an expression that is none": {"pre_tokenizer": _split(pattern={"Regex": "(("})},
    "an unknown token's number": {"model": _unigram([_END, 0.0], unknown=99)},
    "numbers of 32 bits": {"model": {**_WORDS, "vocab": {"a": 0, _END: 4_000_000_000}}},
}
_WITH_A_TEXT: dict[str, dict[str, Any]] = {
    "parts of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "an expression that backtracks": {"pre_tokenizer": _split(pattern={"Regex": "(a+)+$"})},
}
_UNKNOWN: dict[str, dict[str, Any]] = {
    "words": {"model": {**_WORDS, "vocab": {_END: 1}}},
    "unigrams": {"model": _unigram([_END, -1.0], unknown=None)},
}


def _file(folder: Path, **parts: Any) -> str:
    whole = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel(_WORDS["vocab"], "[UNK]")).to_str())
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(whole | parts))
    return str(path)


@pytest.mark.parametrize("kind", _PARTS)
def test_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    name = _file(tmp_path, **_PARTS[kind])
    with pytest.raises(HpctrainError) as caught:
        open_tokenizer(name, _END)
    assert name in str(caught.value.record()["values"])


@pytest.mark.parametrize("kind", _WITH_A_TEXT)
def test_what_fails_with_a_text_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 64 + "!")
    name = _file(tmp_path, **_WITH_A_TEXT[kind])
    work = Preparation(sources=(tmp_path / "text.txt",), folder=tmp_path / "out", tokenizer=name, validation_share=0)
    with pytest.raises(HpctrainError) as caught:
        prepare_text(work, map, lambda words: None)
    assert name in str(caught.value.record()["values"])


@pytest.mark.parametrize("kind", _UNKNOWN)
def test_texts_that_it_cannot_encode_name_it(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(_file(tmp_path, **_UNKNOWN[kind]), _END)
    with refused("HT-tokenizer-wrong", path=tmp_path / "tokenizer.json"):
        tokenizer.tokens(["a b c"])


@pytest.mark.parametrize("content", [bytes(range(256)), b"[" * 100_000])
def test_what_is_no_json_of_a_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with refused("HT-tokenizer-wrong"):
        open_tokenizer(str(tmp_path / "tokenizer.json"), _END)
