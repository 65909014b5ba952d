"""The sizes of transformers against published numbers, and where they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.transformers.model_sizes import (
    known,
    named,
    parse,
    transformer,
)
from support.refusals import refused

SMALL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp": 96, "vocabulary": 100, "context": 32}
PUBLISHED = {name: each["parameters"] for name, each in known().items() if "parameters" in each}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name):
    assert named(name).parameters.total == PUBLISHED[name]


def test_every_known_transformer_has_a_source():
    assert len(PUBLISHED) > 25
    for name in known():
        # The number in a name is in millions or billions of parameters.
        number = name.rpartition("-")[2]
        if number[:-1].replace(".", "").isdigit():
            unit = {"m": 1e6, "b": 1e9}[number[-1]]
            assert named(name).parameters.total == pytest.approx(float(number[:-1]) * unit, rel=0.25), name


def test_a_few_words_are_a_transformer():
    text = "layers=32,width=4096,heads=32,kv_heads=8,mlp=14336,vocabulary=128256,context=8192,kind=swiglu"
    assert parse(text) == transformer(text) == named("llama3-8b")
    assert parse("layers=12,width=768,heads=12,vocabulary=50257,context=1024") == named("gpt2")
    assert parse(text + ",tied=true,bias=qkv").parameters.head == 0


LLAMA = {"kind": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": "none", "tied": False}


def test_a_window_bounds_what_tokens_attend_to():
    plain = Transformer(**{**SMALL, **LLAMA})
    for window, sequence in ((8, 32), (16, 32), (32, 32), (64, 32)):
        counted = sum(min(token + 1, window) for token in range(sequence)) / sequence
        found = replace(plain, window=window)
        # A token counts half of itself.
        assert found.attended(sequence) == pytest.approx(counted - min(window, sequence) / sequence / 2, rel=0.001)
    assert replace(plain, window=32).attended(32) == plain.attended(32) == 16
    assert replace(plain, causal=False).attended(32) == 32


GOOD = "layers=2,width=64,heads=4,vocabulary=100,context=32"


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("llama4-8b", "HT-choice-unknown", {"name": "llama4-8b"}),
        ("config.json", "HT-choice-unknown", {"name": "config.json"}),
        (f"{GOOD},depth=3", "HT-transformer-not-valid", {"key": "depth"}),
        (f"{GOOD},layers=3", "HT-transformer-not-valid", {"key": "layers"}),
        ("layers=2,width=64", "HT-transformer-not-valid", {"missing": "heads, vocabulary, context"}),
        (f"{GOOD},mlp=4e3", "HT-option-bad-value", {"value": "4e3"}),
        (f"{GOOD},mlp={'9' * 5000}", "HT-option-bad-value", {"key": "mlp"}),
        (f"{GOOD},mlp=-4", "HT-option-bad-value", {"value": "-4"}),
        (f"{GOOD},mlp=0", "HT-key-out-of-range", {"key": "mlp", "least": 1}),
        (f"{GOOD},tied=yes", "HT-choice-unknown", {"value": "yes"}),
        (f"{GOOD},kind=moe", "HT-choice-unknown", {"key": "kind", "value": "moe"}),
        (f"{GOOD},causal=false,window=8", "HT-transformer-not-valid", {"window": 8}),
        (f"{GOOD},kv_heads=3", "HT-model-not-divisible", {"value": 4, "parts": 3}),
    ],
)
def test_other_words_are_refused(text, code, values):
    with refused(code, **values):
        transformer(text)
