"""The documents of text files: one of each line of a ``.jsonl``, and any other file as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.errors import counted
from hpctrain.common.files.disk import read_error, reading
from hpctrain.common.files.regular import open_regular, read_regular
from hpctrain.common.shards.manifest import wrong_source

_LINES = ".jsonl"
_KINDS = (".txt", ".md", ".rst", _LINES)
_KEY = "text"
# The limit for one document, a file or a line: each is in memory as a whole, several times.
_MOST_DOCUMENT_BYTES = 1 << 31
_MOST_LINE_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file of text.

    Attributes:
        name: its path below its source, which identifies it wherever the source lies.
        size: the document's size in bytes.
    """

    path: Path
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """The documents of a file that begin at the bytes from ``begin`` up to ``end``."""

    path: Path
    begin: int
    end: int


def list_files(sources: Sequence[Path], say: Callable[[str], None]) -> list[TextFile]:
    """The files of all sources, in their order; those of a folder by their names, without hidden ones.

    Args:
        say: is called with what is left out of each folder: other files, and links to folders, which could lead in
            circles.

    Raises:
        HpctrainError: a source is not there, or holds no text.
    """
    return [file for source in sources for file in _files(source, say)]


def _files(source: Path, say: Callable[[str], None]) -> Iterator[TextFile]:
    paths = [source]
    if source.is_dir():
        # Not folders, whose files are among these; their names may end in .md.
        found = [path for path in sorted(source.rglob("*")) if path.is_symlink() or not path.is_dir()]
        names = {path: path.relative_to(source) for path in found}
        seen = {path: name for path, name in names.items() if not any(part.startswith(".") for part in name.parts)}
        paths = [path for path in seen if _is_text(path)]
        others = [str(name) for path, name in seen.items() if not _is_text(path)]
        if paths and others:
            say(counted(f"{source}: left out, since they end in none of {', '.join(_KINDS)}", others))
    if not paths:
        raise wrong_source(source, "has no text in it", f"looked for files that end in {', '.join(_KINDS)}")
    for path in paths:
        if not _is_text(path):
            hint = "a .txt, .md or .rst is one document; a .jsonl has one per line, an object with the key text"
            raise wrong_source(path, "is neither a text file nor a folder of text files", hint)
        with reading(path, "name files or folders of text"):
            size = path.stat().st_size
        yield TextFile(path=path, name=str(path.relative_to(source)) if path != source else path.name, size=size)


def _is_text(path: Path) -> bool:
    return path.suffix.lower() in _KINDS


def _has_lines(path: Path) -> bool:
    return path.suffix.lower() == _LINES


def listing_digest(files: Iterable[TextFile]) -> str:
    """A digest that identifies a source independently of its place: names and sizes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name!r} {file.size}\n".encode())
    return digest.hexdigest()


def divide(files: Iterable[TextFile], size: int) -> list[tuple[Span, ...]]:
    """Parts of about ``size`` bytes or more, in the order of the files; a document is in one alone."""
    parts: list[list[Span]] = []
    room = 0
    for span in (span for file in files for span in _spans(file, size)):
        if room <= 0:
            parts.append([])
            room = size
        parts[-1].append(span)
        room -= span.end - span.begin
    return [tuple(part) for part in parts]


def _spans(file: TextFile, size: int) -> Iterator[Span]:
    step = size if _has_lines(file.path) else max(1, file.size)
    for begin in range(0, file.size, step):
        yield Span(path=file.path, begin=begin, end=min(file.size, begin + step))


def documents(span: Span) -> Iterator[str]:
    """The texts that begin in a span.

    Raises:
        HpctrainError: the file cannot be read or is no text; names the byte.
    """
    try:
        if _has_lines(span.path):
            yield from _lines(span)
        else:
            # Without the mark that editors on Windows put first, as json reads lines without it.
            text = read_regular(span.path, _MOST_DOCUMENT_BYTES).decode("utf-8-sig")
            yield text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise read_error(error, span.path, "is the source still there?") from error
    except UnicodeDecodeError as error:
        raise wrong_source(
            span.path, f"byte {error.start} is not UTF-8", "convert the file, or leave it out"
        ) from error


def _lines(span: Span) -> Iterator[str]:
    with open_regular(span.path) as file:
        if span.begin:
            # A line that begins earlier belongs to the span before; if one ends just here, none is skipped.
            file.seek(span.begin - 1)
            while not (part := file.readline(_MOST_LINE_BYTES)).endswith(b"\n") and part:
                pass
        while (place := file.tell()) < span.end:
            line = file.readline(_MOST_LINE_BYTES + 1)
            if len(line) > _MOST_LINE_BYTES:
                problem = f"the line that begins at byte {place} is longer than {_MOST_LINE_BYTES / 1e6:g} MB"
                raise wrong_source(span.path, problem, "divide it into several documents")
            if not line:
                problem = f"ends at byte {place}, and had {span.end} when it was listed"
                raise wrong_source(span.path, problem, "the source changed: begin again with it as it is now")
            if line.strip():
                yield _text(line, span.path, place)


def _text(line: bytes, path: Path, place: int) -> str:
    try:
        text = json.loads(line)[_KEY]
        if isinstance(text, str):
            # Refuses a lone surrogate, which is half a character.
            text.encode()
            return text
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    problem = f"the line that begins at byte {place} is not a JSON object whose key {_KEY!r} is a text"
    raise wrong_source(path, problem, "correct the line, or leave the file out")
