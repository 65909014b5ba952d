"""What notebooks are stored with: the outputs of one execution, without what differs from one to the next."""

from __future__ import annotations

import base64
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_output
from PIL import Image

# How often a busy machine says that it still loads is nothing that a reader has to know.
_PATIENCE = re.compile(r"hpctrain: still .* \(\d+ s\)\n")
# What no two executions share, or no two machines: speeds, times, hosts, addresses of objects.
_MEASURED = [
    (re.compile(r"[\d,]+ samples/s"), "N samples/s"),
    (re.compile(r"\d+ threads? each"), "N threads each"),
    (re.compile(r"comm +\d+%"), "comm N%"),
    (re.compile(r"[\d.]+ (ms|s)\b"), r"N \1"),
    (re.compile(r" on [\w.-]+\)"), " on HOST)"),
    (re.compile(r"\b0x[0-9a-f]+"), "ADDRESS"),
    # A machine whose counters can be read has figures, and a line about them.
    (re.compile(r"'energy_kwh': .*?(?='metrics')", re.DOTALL), ""),
    (re.compile(r"^energy .*\n", re.MULTILINE), ""),
    (re.compile(r"'(samples_per_s|communication_share|data_share|seconds)': [\d.e-]+"), r"'\1': N"),
]
# Sums in another order, on another CPU, change the digits of these; the tests know how far they may be off.
_TRAINED = re.compile(r"(?<=loss|racy|rror|dian).*")
_DECIMAL = re.compile(r"\d+\.\d+(e-?\d+)?")


def tidied(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """The outputs of a cell as they are stored: whole lines, those of one stream together, pictures in 256 colours."""
    tidy: list[NotebookNode] = []
    for is_stream, group in itertools.groupby(_whole_lines(outputs), key=lambda each: each[0] is not None):
        if not is_stream:
            tidy += [_small(output) for _, output in group]
            continue
        texts: dict[str | None, str] = {}
        for name, line in group:
            texts[name] = texts.get(name, "") + line
        tidy += [new_output("stream", name=name, text=text) for name, text in texts.items() if text]
    return tidy


def comparable(outputs: Sequence[NotebookNode]) -> dict[str, Any]:
    """What two executions of a cell have in common, on any machine."""
    streams = {"stdout": "", "stderr": ""}
    shown = []
    for output in tidied(outputs):
        if output.output_type == "stream":
            # Which of two streams came first is chance.
            streams[output.name] += _without_measured(output.text)
        else:
            shown.append({"type": output.output_type, **{kind: _told(kind, data) for kind, data in _data(output)}})
    return {**streams, "shown": shown}


def _whole_lines(outputs: Iterable[NotebookNode]) -> Iterator[tuple[str | None, Any]]:
    """The streams' lines, each at the place of its end, and the other outputs without a stream's name."""
    begun = {"stdout": "", "stderr": ""}
    for output in outputs:
        if output.output_type != "stream":
            yield None, output
            continue
        *lines, begun[output.name] = (begun[output.name] + output.text).split("\n")
        yield from ((output.name, f"{line}\n") for line in lines if not _PATIENCE.fullmatch(f"{line}\n"))
    yield from ((name, line) for name, line in begun.items() if line)


def _small(output: NotebookNode) -> NotebookNode:
    if picture := output.get("data", {}).get("image/png"):
        file = io.BytesIO()
        Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(256).save(file, "PNG", optimize=True)
        output.data["image/png"] = base64.b64encode(file.getvalue()).decode()
    return output


def _data(output: NotebookNode) -> list[tuple[str, str]]:
    return sorted(output.get("data", {"error": output.get("evalue", "")}).items())


def _told(kind: str, data: str) -> Any:
    match kind:
        case "image/png":
            return "a picture"
        case "image/svg+xml":
            return sorted(re.findall(r">([^<>]+)</text>", data))
        case "text/html":
            return re.findall(r'src="([^"]*)"', data)
    return _without_measured(data)


def _without_measured(text: str) -> str:
    for pattern, instead in _MEASURED:
        text = pattern.sub(instead, text)
    return _TRAINED.sub(lambda trained: _DECIMAL.sub("N", trained[0]), text)
