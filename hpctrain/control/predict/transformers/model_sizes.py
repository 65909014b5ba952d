"""Where the sizes of a transformer come from: a known name, a few words, or a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import Section, load_checked
from hpctrain.common.files.regular import read_text
from hpctrain.common.recipes.transformer import CHOICES, Transformer

_EXAMPLE = (
    "for example layers=32,width=4096,heads=32,kv_heads=8,mlp=14336,vocabulary=128256,context=8192,kind=swiglu, or "
    "llama3-8b, or a config.json"
)
_NEEDED = ("layers", "width", "heads", "vocabulary", "context")
_KEYS = {field.name: str(field.type) for field in fields(Transformer)}
# The longest config.json of a dense transformer has some kilobytes.
_LONGEST_CONFIG = 2**20
# Python refuses to read thousands of digits.
_DIGITS = 18


class _KnownFile(Section):
    """Published transformers by name, with fields of :class:`Transformer` that differ within their family.

    ``source`` of a family says where its sizes are, ``parameters`` is the published number.
    """

    families: dict[str, dict[str, Any]]
    transformers: dict[str, dict[str, Any]]


@cache
def _file() -> _KnownFile:
    path = Path(__file__).with_name("transformers.yaml")
    text = path.read_text(encoding="utf-8")
    return load_checked(text, path, _KnownFile, "file of transformers", "reinstall hpctrain")


def known() -> Mapping[str, Mapping[str, Any]]:
    """The published transformers that have a name."""
    return _file().transformers


def named(name: str) -> Transformer:
    """A published transformer, if one has this name."""
    found = known().get(name)
    if found is None:
        # Another one, however alike its name, would be another network.
        valid = f"valid: {', '.join(known())}"
        raise HpctrainError("HT-choice-unknown", "no transformer {name!r} is known", valid, name=name)
    values = {**_file().families[found["family"]], **found}
    return _made({key: value for key, value in values.items() if key in _KEYS})


def parse(text: str) -> Transformer:
    """The transformer of a text of the form ``layers=32,width=4096,…``.

    By default it is that of GPT-2, and with ``kind=swiglu`` that of Llama; the MLP is four times as wide as the rest.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS or key in values:
            raise HpctrainError(
                "HT-transformer-not-valid",
                "{text}: {part!r} is not of the form KEY=VALUE with a known key, given once",
                nearest(key, _KEYS),
                text=text,
                part=part,
                key=key,
            )
        values[key] = read_value(text, key, value, kind=_KEYS[key], choices=CHOICES.get(key, ()))
    if missing := [key for key in _NEEDED if key not in values]:
        lacks = ", ".join(missing)
        raise HpctrainError("HT-transformer-not-valid", "{text} lacks {missing}", _EXAMPLE, text=text, missing=lacks)
    return _made({**(_LLAMA if values.get("kind") == "swiglu" else {}), **values})


def read_value(text: str, key: str, value: str, *, kind: str, choices: tuple[object, ...] = ()) -> Any:
    """The value of a field that ``KEY=VALUE`` gives to a dataclass, of ``kind``, or one of few ``choices``."""
    choices = (False, True) if kind == "bool" else choices
    if choices:
        by_name = {str(choice).lower() if kind == "bool" else str(choice): choice for choice in choices}
        if value not in by_name:
            raise HpctrainError(
                "HT-choice-unknown",
                "{text}: {key} is {value!r}",
                nearest(value, tuple(by_name)),
                text=text,
                key=key,
                value=value,
            )
        return by_name[value]
    if kind != "int":
        return value
    if not (value.isascii() and value.isdecimal() and len(value) <= _DIGITS):
        raise HpctrainError(
            "HT-option-bad-value",
            "{text}: {key} is {value!r}, not a whole number of at least 0",
            text=text,
            key=key,
            value=value,
        )
    return int(value)


def transformer(text: str) -> Transformer:
    """A transformer by its name, its sizes, or the path of its ``config.json`` or of the folder with it."""
    if text in known():
        return named(text)
    if text.endswith(".json") or "/" in text:
        path = Path(text)
        return from_config(path / "config.json" if os.path.isdir(path) else path)  # noqa: PTH112  # of a name that is too long
    return parse(text) if "=" in text else named(text)


def from_config(path: Path) -> Transformer:
    """The transformer of a Hugging Face ``config.json``; what is not known of is refused."""
    text = read_text(path, "model configuration", _EXAMPLE, limit=_LONGEST_CONFIG)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HpctrainError("HT-transformer-not-valid", "{path} is not JSON", _EXAMPLE, path=path) from error
    valid = f"valid: {', '.join(CONFIGS)}; of dense transformers alone"
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(kind, str):
        raise HpctrainError("HT-transformer-not-valid", "{path} has no model_type", valid, path=path)
    inner = _section(found, "ffn_config")
    several = any(each.get(key) not in (None, 0, 1) for each in (found, inner) for key in _EXPERTS)
    if several or "moe" in f"{kind} {inner.get('ffn_type')}".lower():
        problem = "is a mixture of experts, whose memory and time depend on where tokens are sent"
    elif kind not in CONFIGS:
        # Another kind in its place would be another network, however alike the names.
        problem = "is not known"
    else:
        return _Config(path, kind, found).transformer()
    values: dict[str, Any] = {"path": path, "model": kind, "problem": problem}
    raise HpctrainError("HT-transformer-not-supported", "{path}: the kind {model!r} {problem}", valid, **values)


def _section(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


_LLAMA = {"kind": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": "none", "tied": False}


def _made(values: dict[str, Any]) -> Transformer:
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("mlp", 4 * values["width"])
    return Transformer(**values)


@dataclass(frozen=True)
class _Config:
    """One ``config.json``. Defaults are those of the classes in Transformers, for keys that the file leaves out."""

    path: Path
    kind: str
    values: dict[str, Any]

    def number(self, *keys: str, default: int | None = None) -> int:
        """The whole number of the first key that the file has."""
        value = next((self.values[key] for key in keys if self.values.get(key) is not None), default)
        if type(value) is int:
            return value
        raise self.wrong(keys[0], "missing" if value is None else repr(value), "a whole number")

    def flag(self, key: str, *, default: bool) -> bool:
        """Whether a key is true."""
        value = self.values.get(key, default)
        if isinstance(value, bool):
            return value
        raise self.wrong(key, repr(value), "true or false")

    def wrong(self, key: str, value: str, wanted: str) -> HpctrainError:
        """The error for a key with a value of another type."""
        values: dict[str, Any] = {"path": self.path, "key": key, "value": value[:80], "wanted": wanted}
        return HpctrainError("HT-transformer-not-valid", "{path}: {key} is {value}, not {wanted}", **values)

    def refuse(self, key: str) -> None:
        """Say that a key makes another network of it."""
        raise HpctrainError(
            "HT-transformer-not-supported",
            "{path}: {key} {value} makes a network whose sizes are not known here",
            path=self.path,
            key=key,
            value=repr(self.values.get(key))[:80],
        )

    def transformer(self) -> Transformer:
        """The transformer, whose mistakes are those of the file."""
        self._require_own_code()
        try:
            return _made(CONFIGS[self.kind](self))
        except HpctrainError as error:
            raise error if "path" in error.values else error.but(before=f"{self.path}: ") from None

    def _require_own_code(self) -> None:
        """Refuse classes that are not Transformers' own: forks, drafts for speculative decoding, and other heads, such
        as those of classifiers, which do not have the vocabulary's rows.
        """
        own = re.compile(rf"{self.kind.replace('_', '')}(?:{_HEADS})", re.IGNORECASE)
        listed = self.values.get("architectures") or []
        if not all(own.fullmatch(str(each)) for each in (listed if isinstance(listed, list) else [listed])):
            self.refuse("architectures")
        if _section(self.values, "auto_map").keys() - {"AutoTokenizer"}:
            self.refuse("auto_map")
        for key in _OTHERS:
            if self.values.get(key):
                self.refuse(key)

    def absent(self, *keys: str) -> None:
        """Refuse keys that make another network where they are true."""
        for key in keys:
            if self.flag(key, default=False):
                self.refuse(key)

    def window(self, default: int = 0) -> int:
        """The window of attention that all layers have."""
        kinds = self.values.get("layer_types") or ["full_attention"]
        if not isinstance(kinds, list) or kinds[0] not in _WINDOWS or any(each != kinds[0] for each in kinds):
            self.refuse("layer_types")
        own = self.number("sliding_window", default=0) if "sliding_window" in self.values else default
        return own if "layer_types" not in self.values or kinds[0] == "sliding_attention" else 0

    def usual(self) -> dict[str, Any]:
        """The keys that most kinds call the same."""
        return {
            "layers": self.number("num_hidden_layers"),
            "width": self.number("hidden_size"),
            "heads": self.number("num_attention_heads"),
            "vocabulary": self.number("vocab_size"),
            "context": self.number("max_position_embeddings"),
        }


def _gpt2(config: _Config) -> dict[str, Any]:
    config.absent("add_cross_attention")
    width = config.number("n_embd")
    return {
        "layers": config.number("n_layer"),
        "width": width,
        "heads": config.number("n_head"),
        "mlp": config.number("n_inner", default=4 * width),
        "vocabulary": config.number("vocab_size"),
        "context": config.number("n_positions", "n_ctx"),
        "tied": config.flag("tie_word_embeddings", default=True),
    }


def _llama(config: _Config, *, head_width: int = 0) -> dict[str, Any]:
    config.absent("attention_bias", "mlp_bias", "use_sliding_window")
    found = config.usual()
    # These stand for a missing key; null is one head of keys and values for each head.
    missing = "num_key_value_heads" not in config.values
    usual = _KV_HEADS.get(config.kind, found["heads"]) if missing else found["heads"]
    return {
        **_LLAMA,
        **found,
        "mlp": config.number("intermediate_size"),
        "kv_heads": config.number("num_key_value_heads", default=usual),
        "head_width": config.number("head_dim", default=head_width),
        "window": config.window(_WINDOW[config.kind]) if config.kind in _WINDOW else 0,
        "tied": config.flag("tie_word_embeddings", default=False),
    }


CONFIGS: Mapping[str, Callable[[_Config], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda config: {**_llama(config), "bias": "qkv"},
    "qwen3": lambda config: {**_llama(config, head_width=128), "head_norms": True},
}
# Keys by which mixtures of experts say how many they have: Mixtral, Qwen, DeepSeek, DBRX.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Heads of keys and values of MistralConfig and Qwen2Config in Transformers 5.23 where a file has no such key.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
# The same for the window of attention. LlamaModel reads none, and that of Qwen2 is off unless ``use_sliding_window`` is
# true.
_WINDOW = {"mistral": 4096}
# What follows a kind in the names of Transformers' classes that have the vocabulary's rows, or no head.
_HEADS = "Model|ForCausalLM|LMHeadModel"
# Keys of networks that were changed, and of drafts for speculative decoding.
_OTHERS = ["quantization_config", "pruned_heads", "draft_vocab_size", "eagle_config", "medusa_num_heads"]
_OTHERS += ["speculators_config"]
_WINDOWS = ("full_attention", "sliding_attention")
