"""The sizes of transformers against published numbers, and where they come from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.transformers.model_sizes import (
    from_config,
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


CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
CONFIG |= {"max_position_embeddings": 32, "intermediate_size": 96}
GROUPED = {**CONFIG, "num_key_value_heads": 2}
LLAMA = {"kind": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": "none", "tied": False}
QWEN2 = {**LLAMA, "bias": "qkv"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32},
            {"kv_heads": 4, "mlp": 256},
        ),
        ({"model_type": "llama", **GROUPED, "architectures": ["LlamaForCausalLM"]}, LLAMA),
        ({"model_type": "llama", **GROUPED, "architectures": ["LLaMAForCausalLM"], "auto_map": {}}, LLAMA),
        ({"model_type": "llama", **GROUPED, "sliding_window": 16}, LLAMA),
        ({"model_type": "mistral", **GROUPED, "head_dim": 8}, {**LLAMA, "head_width": 8, "window": 4096}),
        ({"model_type": "mistral", **GROUPED, "sliding_window": None}, LLAMA),
        (
            {"model_type": "mistral", **GROUPED, "sliding_window": 16, "layer_types": ["full_attention"] * 2},
            LLAMA,
        ),
        ({"model_type": "qwen2", **GROUPED, "sliding_window": 16, "use_sliding_window": False}, QWEN2),
        ({"model_type": "qwen2", **GROUPED, "tie_word_embeddings": True}, {**LLAMA, "bias": "qkv", "tied": True}),
        ({"model_type": "qwen3", **GROUPED}, {**LLAMA, "head_width": 128, "head_norms": True}),
        (
            {"model_type": "mistral", **CONFIG, "num_attention_heads": 16},
            {**LLAMA, "heads": 16, "kv_heads": 8, "window": 4096},
        ),
        ({"model_type": "mistral", **CONFIG, "num_key_value_heads": None}, {**LLAMA, "kv_heads": 4, "window": 4096}),
        ({"model_type": "qwen2", **CONFIG, "num_attention_heads": 64}, {**QWEN2, "heads": 64, "kv_heads": 32}),
        ({"model_type": "llama", **GROUPED, "num_local_experts": 1}, LLAMA),
    ],
    ids=lambda values: values.get("model_type", ""),
)
def test_configurations_of_hugging_face_are_read(tmp_path, values, expected):
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert transformer(str(tmp_path)) == from_config(tmp_path / "config.json") == Transformer(**{**SMALL, **expected})


REFUSED_KEYS = (
    ("llama", {"mlp_bias": True}),
    ("gpt2", {"add_cross_attention": True}),
    ("llama", {"pruned_heads": {"0": [1]}}),
    ("qwen2", {"use_sliding_window": True}),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("llama", {"quantization_config": {"bits": 4}}),
    ("llama", {"architectures": ["LlamaForCausalLMEagle3"]}),
    ("llama", {"architectures": ["MistralForCausalLM"]}),
    ("llama", {"architectures": 5}),
    ("gpt2", {"architectures": ["GPT2LMHeadCustomModel"]}),
    ("gpt2", {"auto_map": {"AutoModelForCausalLM": "modeling_gpt2.GPT2LMHeadModel"}}),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}),
    ("llama", {"draft_vocab_size": 32000}),
    ("llama", {"speculators_config": {"algorithm": "eagle"}}),
)
REFUSED_MODELS = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {},
    "deepseek_v3": {"n_routed_experts": 256},
    "mamba": {},
    "bert": {},
    "gemma2": {},
    "falcon": {"new_decoder_architecture": False},
    "t5": {"d_model": 64},
    "dbrx": {"ffn_config": {"moe_num_experts": 16}},
}


@pytest.mark.parametrize(
    ("values", "code", "named_values"),
    [
        ({"model_type": ["llama"]}, "HT-transformer-not-valid", {}),
        ([], "HT-transformer-not-valid", {}),
        ({"model_type": "llama", **GROUPED, "hidden_size": "64"}, "HT-transformer-not-valid", {"key": "hidden_size"}),
        ({"model_type": "llama", "hidden_size": 64}, "HT-transformer-not-valid", {"key": "num_hidden_layers"}),
        ({"model_type": "llama", **GROUPED, "mlp_bias": "false"}, "HT-transformer-not-valid", {"key": "mlp_bias"}),
        ({"model_type": "llama", **GROUPED, "vocab_size": 10**30}, "HT-key-out-of-range", {"key": "vocabulary"}),
        ({"model_type": "llama", **GROUPED, "hidden_size": 65}, "HT-model-not-divisible", {"value": 65, "parts": 4}),
        *(
            ({"model_type": kind, **GROUPED, **own}, "HT-transformer-not-supported", {"key": next(iter(own))})
            for kind, own in REFUSED_KEYS
        ),
        *(
            ({"model_type": kind, **GROUPED, **own}, "HT-transformer-not-supported", {"model": kind})
            for kind, own in REFUSED_MODELS.items()
        ),
    ],
)
def test_other_configurations_are_refused(tmp_path, values, code, named_values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with refused(code, **named_values):
        from_config(path)


def test_a_window_bounds_what_tokens_attend_to():
    plain = Transformer(**{**SMALL, **LLAMA})
    for window, sequence in ((8, 32), (16, 32), (32, 32), (64, 32)):
        counted = sum(min(token + 1, window) for token in range(sequence)) / sequence
        found = replace(plain, window=window)
        # A token counts half of itself.
        assert found.attended(sequence) == pytest.approx(counted - min(window, sequence) / sequence / 2, rel=0.001)
    assert replace(plain, window=32).attended(32) == plain.attended(32) == 16
    assert replace(plain, causal=False).attended(32) == 32


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with refused("HT-transformer-not-valid", path=path):
        from_config(path)
    path.write_bytes(b" " * (2**20 + 1))
    with refused("HT-file-unreadable"):
        from_config(path)


GOOD = "layers=2,width=64,heads=4,vocabulary=100,context=32"


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("llama4-8b", "HT-choice-unknown", {"name": "llama4-8b"}),
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
