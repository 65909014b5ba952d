"""Writes the tables of docs/reference from the code, each between two marks; as a hook of MkDocs, those of predictions.

``python .ci/pages.py`` writes them; ``tests/unit/test_pages.py`` says whether they are those of the code.
"""

from __future__ import annotations

import inspect
import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from error_codes import kinds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpctrain.cli.main import app
from hpctrain.common import settings
from hpctrain.common.cluster.gpu_models import buses, gpus
from hpctrain.common.files.checked_yaml import subsection
from hpctrain.common.recipes.keys import kinds_of
from hpctrain.common.recipes.schema import Recipe
from hpctrain.control.predict.transformers.rates import step_constants, step_file
from hpctrain.control.predict.values import Constant, constants

REFERENCE = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))

# Figures of the predictions' code that have no spread: where each is, and the comment there has its source.
_FIXED = (
    ("draws of each figure", "values.DRAWS"),
    ("an interval begins above this share of the draws", "values.LOW"),
    ("and ends above this one", "values.HIGH"),
    ("adapters over which hpctrain's own engine sends", "allreduce_time._MPI_RAILS"),
    ("passes of `p` ranks' bytes through a host's memory, `a p + b`", "allreduce_time._VOLUMES"),
    ("bytes that an update moves of a parameter, by the optimizer's numbers for it", "compute._UPDATE_BYTES"),
    ("of a GPU's memory, lost to the allocator's rounding and holes", "memory.FRAGMENTATION"),
    ("bytes of a process's CUDA context and workspaces", "memory.CONTEXT_BYTES"),
    ("ports of switches for each adapter, for their energy", "prediction.SWITCH_PORTS"),
    ("images of training and validation", "training._IMAGES"),
    ("epochs to 75.9 % by batch, the fewest and the most", "training._REFERENCE"),
)
_LINK = re.compile(r"https?://[^\s,()]*[^\s,():]")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the constants of predictions in the place of their mark."""
    mark = "<!-- constants -->"
    if page.file.src_uri != "prediction.md":
        return markdown
    if markdown.count(mark) != 1:
        raise ValueError(f"docs/prediction.md needs the line {mark} once: what is made goes there")
    return markdown.replace(mark, prediction_constants())


def written(page: Path) -> str:
    """A page with what is made of the code now between ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""
    return _MARKED.sub(lambda found: f"{found[1]}\n\n{_MADE[found[2]]()}\n\n{found[3]}", page.read_text())


def commands() -> str:
    """Every command with its arguments and options, in Markdown, below headings of the third level."""
    parts = []
    for name, command in _commands(typer.main.get_command(app), "hpctrain", None):
        rows = [
            (
                _cell(f"`{' '.join([*each.opts, *each.secondary_opts]) if each.opts[0][0] == '-' else each.metavar}`"),
                _cell(each.help or ""),
            )
            for each in command.params
        ]
        table = _table(("argument or option", "meaning"), rows, right=0) if rows else ""
        parts.append(f"### {name}\n\n{inspect.cleandoc(command.help or '')}\n\n{table}".rstrip())
    return "\n\n".join(parts)


def _commands(command: Any, name: str, parent: Any) -> Iterator[tuple[str, Any]]:
    """The commands that are no groups of others."""
    context = typer.Context(command, info_name=name, parent=parent)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    for each in names:
        yield from _commands(command.resolve_command(context, [each])[1], f"{name} {each}", context)
    if not names:
        yield name, command


def environment_variables() -> str:
    """The environment variables that are meant for users, in two Markdown tables."""
    found = [each for each in vars(settings).values() if isinstance(each, settings.Setting)]
    read = [(f"`{each.name}`", each.valid, _default(each), each.purpose) for each in found if each.set_by == "user"]
    given = [(f"`{each.name}`", each.valid, each.purpose) for each in found if each.set_by == "hpctrain"]
    users = _table(("variable", "value", "default", "what it sets"), read, right=0)
    return f"{users}\n\nScripts can read:\n\n{_table(('variable', 'value', 'what it says'), given, right=0)}"


def _default(setting: settings.Setting) -> str:
    return "" if setting.default is None else f"`{str(setting.default).removesuffix('.0')}`"


def prediction_constants() -> str:
    """Every constant of the predictions, in Markdown tables below headings of the third level."""
    tables = {
        "Devices, engines, power": _general(),
        "GPUs: data sheets": _sheets(),
        "GPUs: what the roofline is multiplied by": _paces(),
        "All-reduces within a node": _buses(),
        "Without a spread": _fixed(),
        "A transformer's step": _step(),
        "What trains transformers": _software(),
    }
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in tables.items())


def _general() -> str:
    made = {f"{gpu}.{key}" for gpu in gpus() for key in (*_SHEET, "pace")} | {f"bus.{name}" for name in buses()}
    rows = [(f"`{name}`", *_described(each)) for name, each in constants().items() if name not in made]
    return _table(("constant", "value", "spread", "kind", "source"), rows, right=2)


def _step() -> str:
    rows = [
        (f"`{name}`", f"{each.value:g} {each.unit}".strip(), f"{each.prior:g} ±{each.spread:.0%}", _linked(each.source))
        for name, each in step_file().constants.items()
    ]
    return _table(("constant", "as fitted", "as expected", "where the expectation is from"), rows, right=3)


def _software() -> str:
    rows = [
        (f"`{name}`", f"{step_constants()[f'software.{name}']:g}", f"{each.launch:g}", each.about)
        for name, each in step_file().software.items()
    ]
    return _table(("software", "speed", "time to launch", "what it is"), rows, right=3)


# What a data sheet states, with the factor and the unit of the table's column.
_SHEET = {
    "vector_flops": ("float32, TFLOP/s", 1e12),
    "conv32_flops": ("float32 convolutions, TFLOP/s", 1e12),
    "half_flops": ("16 bit, TFLOP/s", 1e12),
    "memory_bytes_per_s": ("memory, GB/s", 1e9),
    "power_w": ("limit, W", 1.0),
    "idle_w": ("idle, W", 1.0),
}


def _sheets() -> str:
    found = constants()
    rows = [
        (
            f"`{name}`",
            *(f"{found[f'{name}.{key}'].value / factor:g}" for key, (_, factor) in _SHEET.items()),
            *("" if flops is None else f"{flops / 1e12:g}" for flops in (each.fp8_flops, each.fp4_flops)),
            f"{each.memory_mib:,}",
            f"`{each.bus}`",
            _LINK.sub(lambda link: f"[data sheet]({link[0]})", each.source),
        )
        for name, each in gpus().items()
    ]
    titles = ("GPU", *(title for title, _ in _SHEET.values()), "8 bit", "4 bit", "memory, MiB", "joined by", "source")
    ways = dict.fromkeys(
        (found[f"{gpu}.{key}"].spread, found[f"{gpu}.{key}"].kind, title.partition(",")[0])
        for gpu in gpus()
        for key, (title, _) in _SHEET.items()
    )
    told = ", ".join(f"{title} ±{spread:.0%} {kind}" for spread, kind, title in ways)
    return f"{_table(titles, rows, right=9)}\n\nSpread and kind of all: {told}."


def _paces() -> str:
    rows = [(f"`{name}.pace`", *_described(constants()[f"{name}.pace"])) for name in gpus()]
    return _table(("constant", "value", "spread", "kind", "source"), rows, right=2)


def _buses() -> str:
    rows = [
        (
            f"`{name}`",
            ", ".join(f"{size / 1e6:g} MB {rate / 1e9:g}" for size, rate in each.points),
            str(each.of),
            f"±{each.spread:.0%}",
            each.kind,
            _linked(each.source),
        )
        for name, each in buses().items()
    ]
    return _table(("joined by", "bus bandwidth in GB/s by size", "GPUs", "spread", "kind", "source"), rows, right=0)


def _fixed() -> str:
    rows = []
    for meaning, place in _FIXED:
        module, name = place.split(".")
        value = getattr(import_module(f"hpctrain.control.predict.{module}"), name)
        rows.append((meaning, f"`{value}`", f"`{name}` in `hpctrain/control/predict/{module}.py`"))
    return _table(("figure", "value", "where its source is"), rows, right=0)


def _described(each: Constant) -> Sequence[str]:
    return f"{_plain(each.value)} {each.unit}".rstrip(), f"±{each.spread:.0%}", each.kind, _linked(each.source)


def _plain(value: float) -> str:
    return f"{value:.4g}" if 1e-3 <= value < 1e5 else f"{value:.3g}"


def _linked(text: str) -> str:
    return _LINK.sub(lambda found: f"<{found[0]}>", text)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: int) -> str:
    """A table in Markdown; ``right``: so many columns after the first have figures."""
    rules = ["---", *["--:"] * right, *["---"] * (len(titles) - 1 - right)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, rules, *rows))


def recipe_keys() -> str:
    """Every key of a recipe, in Markdown, below a heading of the second level for each section."""
    tables: dict[str, list[tuple[str, str, str, str]]] = {}
    _collect_keys(Recipe, "", tables)
    titles = ("key", "value", "default", "meaning")
    return "\n\n".join(
        f"## {section or 'The recipe itself'}\n\n{_table(titles, rows, right=0)}" for section, rows in tables.items()
    )


def _collect_keys(section: type[BaseModel], path: str, tables: dict[str, list[tuple[str, str, str, str]]]) -> None:
    rows = tables.setdefault(path, [])
    for name, field in section.model_fields.items():
        key = f"{path}.{name}" if path else name
        inner = subsection(section, name)
        kind = f"[section](#{key.replace('.', '')})" if inner else _kind(field)
        about = field.description or _cell((inner.__doc__ if inner else "").split("\n\n")[0])
        meaning = ". ".join(filter(None, [about, _owners_of(path, field)]))
        shown = "" if inner and field.default is not None else _shown(field)
        rows.append((f"`{key}`", kind, shown, _cell(meaning)))
    for name in section.model_fields:
        if inner := subsection(section, name):
            _collect_keys(inner, f"{path}.{name}" if path else name, tables)


def _owners_of(path: str, field: FieldInfo) -> str:
    """The kinds that a key belongs to, by the same marks that refuse it elsewhere."""
    found = []
    for mark in kinds_of(field):
        kinds = ", ".join(f"`{kind}`" for kind in mark.kinds.split())
        found.append(f"Only with `{f'{path}.{mark.decisive}'.lstrip('.')}`: {kinds}")
    return ". ".join(found)


def _kind(field: FieldInfo) -> str:
    return _cell(", ".join(dict.fromkeys(_words(field.annotation, field.metadata))))


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[str]:
    """What a value may be, in words."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        # A number's bounds are those of its Field.
        yield from _words(inner, [bound for each in more for bound in getattr(each, "metadata", [each])])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            if each is not NoneType:
                yield from _words(each, metadata)
    elif get_origin(annotation) is Literal:
        yield from (f"`{each}`" for each in get_args(annotation))
    elif get_origin(annotation) is tuple:
        inside = [each for each in get_args(annotation) if each is not Ellipsis]
        count = "" if Ellipsis in get_args(annotation) else f"{len(inside)} "
        yield f"list of {count}({', '.join(dict.fromkeys(word for each in inside for word in _words(each)))})"
    elif get_origin(annotation) is dict:
        yield f"mapping from names to ({', '.join(_words(get_args(annotation)[1]))})"
    else:
        name = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}[annotation]
        signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
        bounds = [
            f"{sign} {getattr(each, key):,}" for each in metadata for key, sign in signs.items() if hasattr(each, key)
        ]
        yield " ".join([name, *(bounds if annotation in (int, float) else [])])


def _shown(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True)
    return "" if value in (None, "", (), {}) else _cell(f"`{json.dumps(value)}`")


def errors() -> str:
    """Every code with its sentences and what mends them, in Markdown, below a heading of the second level a family."""
    families: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for kind in kinds():
        rows = families.setdefault(kind.code.split("-")[1], {}).setdefault(kind.code, [])
        row = (_sentence(kind.sentence), _plain_text(kind.hint))
        if kind.sentence and row not in rows:
            rows.append(row)
    return "\n\n".join(
        f"## {family}\n\n{_table(('code', 'sentence', 'remedy'), _error_rows(codes), right=0)}"
        for family, codes in families.items()
    )


def _error_rows(codes: dict[str, list[tuple[str, str]]]) -> Iterator[Sequence[str]]:
    for code, rows in codes.items():
        for place, row in enumerate(rows or [("", "")]):
            yield (f"`{code}`" if place == 0 else "", *row)


def _sentence(sentence: str) -> str:
    """A format string with the names of its values alone in braces."""
    parts = string.Formatter().parse(sentence)
    return _plain_text("".join(f"{literal}{{{name}}}" if name else literal for literal, name, _, _ in parts))


def _plain_text(text: str) -> str:
    """A text of the terminal as Markdown that shows it as it is, but for what it quotes as code."""
    parts = _cell(text).split("`")
    parts[::2] = [re.sub(r"([*{}\[\]]|_(?=_)|(?<=_)_)", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`").removesuffix(".")


_MADE = {"settings": environment_variables, "commands": commands, "keys": recipe_keys, "errors": errors}
_MARKED = re.compile(rf"^(<!-- ({'|'.join(_MADE)}) -->)\n.*?^(<!-- end of \2 -->)$", re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    for page in REFERENCE:
        page.write_text(written(page))
