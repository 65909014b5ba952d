"""What is printed in the README and on the pages under docs/: whole scripts, and command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "slurm" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_SCRIPT = re.compile(r"^<!-- (\w+\.py) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```(?:bash|console|sh|shell)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Files of the package are named from there on, too.
_PACKAGE = ROOT / "hpctrain"
_FOLDERS = {path.name for parent in (ROOT, _PACKAGE) for path in parent.iterdir() if path.is_dir()} - {
    "site",
    "hpctrain-runs",
}
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, kw_only=True)
class PrintedCommand:
    """One call of ``hpctrain`` on a page.

    Attributes:
        page: where it is printed.
        words: what follows ``hpctrain``.
        whole: it can be typed as it is printed; one within a sentence may leave arguments out.
    """

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: hpctrain {shlex.join(self.words)}"


def scripts() -> dict[str, str]:
    """Scripts by the names in their marks, ``<!-- name.py -->`` ahead of the block.

    Raises:
        ValueError: two have the same name.
    """
    found: dict[str, str] = {}
    for page in PAGES:
        for name, text in _SCRIPT.findall(page.read_text()):
            if name in found:
                raise ValueError(f"{page}: a second script {name}; give it another name")
            found[name] = text
    return found


def commands() -> list[PrintedCommand]:
    """Every call of ``hpctrain`` in shell blocks and in code within sentences."""
    return [command for page in PAGES for command in commands_of(page.read_text(), str(page.relative_to(ROOT)))]


def commands_of(text: str, page: str) -> Iterator[PrintedCommand]:
    """The calls of ``hpctrain`` in one page's text."""
    for block in _SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (PrintedCommand(page=page, words=words, whole=True) for words in _calls(line))
    for code in _CODE.findall(_BLOCK.sub("", text)):
        # A sentence may be broken anywhere.
        yield from (PrintedCommand(page=page, words=words, whole=False) for words in _calls(" ".join(code.split())))


def options() -> list[tuple[str, str]]:
    """Every option in code within sentences that stands there without its command, with its page."""
    return [
        (str(page.relative_to(ROOT)), re.split(r"[=\s]", code)[0])
        for page in PAGES
        for code in _CODE.findall(_BLOCK.sub("", page.read_text()))
        if re.match("--?[a-zA-Z]", code)
    ]


def files() -> list[tuple[str, str]]:
    """Every file or folder of this repository in code within sentences, with its page; NAME stands for any."""
    return [
        (str(page.relative_to(ROOT)), code)
        for page in PAGES
        for code in _CODE.findall(_BLOCK.sub("", page.read_text()))
        if re.fullmatch(r"(?:[\w.-]+/)+[\w.-]*", code) and "NAME" not in code
        if code.endswith(".py") or code.partition("/")[0] in _FOLDERS
    ]


def is_there(name: str) -> bool:
    """Whether a file or folder of :func:`files` exists."""
    return any((parent / name).exists() for parent in (ROOT, _PACKAGE))


def _calls(line: str) -> Iterator[tuple[str, ...]]:
    """The arguments of each ``hpctrain`` in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    call: list[str] | None = None
    first = True
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&<>"):
            if call is not None:
                yield tuple(call)
            call, first = None, word not in ("<", ">", ">>")
        elif call is not None:
            call.append(word)
        elif first and Path(word).name == "hpctrain":
            call = []
        else:
            # Behind a variable, as in A=1 hpctrain run, there is still the command.
            first = first and "=" in word
