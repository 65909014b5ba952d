"""Editable installations: packages that an environment has by a reference to a folder elsewhere.

References are lines of ``.pth`` files: a folder that goes behind the others of the path, or a module of setuptools that
finds packages after all folders. https://docs.python.org/3/library/site.html
"""

from __future__ import annotations

import ast
import importlib.machinery
import json
import re
from collections import ChainMap
from collections.abc import Container, Iterator
from os.path import relpath
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.control.packing.entries import Entry, walk

_MODULES = tuple(importlib.machinery.all_suffixes())
_FINDER = re.compile(r"import (__editable___\w+_finder)\b")
_ABSOLUTE = re.compile(r"""["'](/[^"']+)["']""")
# Namespace packages within each other, as google.cloud is: https://peps.python.org/pep-0420/
_NAMESPACES = 2
# Folders beside the packages of a checkout, whose edits must not change the archive.
_NO_NAMESPACES = frozenset(("benchmarks", "build", "dist", "doc", "docs", "examples", "test", "tests"))
_AS_IT_IS = "install it without -e: pip install --force-reinstall --no-deps FOLDER"


def editable_entries(prefix: Path, site: Path, own: dict[str, Entry]) -> dict[str, Entry]:
    """The modules that ``.pth`` files refer to, put among the packages, and the files without those lines.

    What Python finds first is taken: the environment's own, then that of the first folder, then that of a finder.

    Args:
        prefix, site: the environment's folder and that of its packages, resolved.

    Raises:
        HpctrainError: an installation whose files cannot be found.
        OSError: a file cannot be read.
    """
    at = site.relative_to(prefix).as_posix()
    found: dict[str, Entry] = {}
    places = ChainMap(found, own)
    folders, finders, resolved = [], [], set[str]()
    for path in sorted(site.glob("*.pth")):
        kept = []
        for line in path.read_text(errors="surrogateescape").splitlines():
            folder = _folder(site, line)
            if finder := _FINDER.match(line):
                finders.append(site / f"{finder[1]}.py")
            elif folder and folder.is_dir() and not folder.is_relative_to(prefix):
                folders.append(folder)
            else:
                kept.append(_portable_line(prefix, path, line, folder))
                if folder is None or not folder.is_relative_to(prefix):
                    continue
            resolved.add(path.name)
        found[f"{at}/{path.name}"] = Entry(content="\n".join([*kept, ""]).encode(errors="surrogateescape"))
    _require_resolved(site, resolved)
    for modules in (*map(_modules, folders), *map(_mapped, finders)):
        for name, path in modules.items():
            if not _is_found(at, name, places):
                found |= {f"{at}/{below}": entry for below, entry in _module(name, path)}
    return found


def _folder(site: Path, line: str) -> Path | None:
    """The folder or file that a line adds to the path; None for code, comments and empty lines."""
    text = line.strip()
    return (site / text).resolve() if text and not line.startswith(("#", "import ", "import\t")) else None


def _portable_line(prefix: Path, path: Path, line: str, folder: Path | None) -> str:
    """A line for the copy. Code that names a path elsewhere, such as ``site.addsitedir('/FOLDER')``, is refused."""
    if folder:
        return relpath(folder, path.parent) if folder.is_relative_to(prefix) else line
    for named in _ABSOLUTE.findall(line) if line.startswith("import") else ():
        if Path(named).exists() and not Path(named).resolve().is_relative_to(prefix):
            raise HpctrainError(
                "HT-pack-code-outside",
                "--pack: {path} runs code that refers to {paths}, which is not packed",
                "give the folder a line of its own there, or install what is in it",
                path=path,
                paths=named,
            )
    return line


def _is_found(at: str, name: str, entries: Container[str]) -> bool:
    """Whether Python finds a module or package of this name, or a package around it, among the entries."""
    module = name[: -len(suffix)] if (suffix := _suffix(name)) else name
    parts = module.split("/")
    packages = ("/".join(parts[: depth + 1]) for depth in range(len(parts)))
    files = (*(f"{each}/__init__.py" for each in packages), *(module + each for each in _MODULES))
    return any(f"{at}/{file}" in entries for file in files)


def _require_resolved(site: Path, resolved: set[str]) -> None:
    for installed in sorted(site.glob("*.dist-info/direct_url.json")):
        if json.loads(installed.read_text()).get("dir_info", {}).get("editable"):
            record = (installed.parent / "RECORD").read_text().splitlines()
            if resolved.isdisjoint(line.partition(",")[0] for line in record):
                project = installed.parent.name.partition("-")[0]
                raise HpctrainError(
                    "HT-pack-editable-unknown",
                    "--pack: {project} is an editable installation of a kind whose files cannot be found",
                    _AS_IT_IS,
                    project=project,
                )


def _modules(folder: Path, namespaces: int = _NAMESPACES) -> dict[str, Path]:
    """The packages and modules of a folder by their paths in it, also those in namespace packages."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").is_file() or (path.is_file() and path.name.endswith(_MODULES)):
            found[path.name] = path
        elif namespaces and path.name.isidentifier() and path.name not in _NO_NAMESPACES and path.is_dir():
            found |= {f"{path.name}/{name}": below for name, below in _modules(path, namespaces - 1).items()}
    return found


def _mapped(finder: Path) -> dict[str, Path]:
    """The modules of setuptools' finder for an editable installation, which is generated and has them in a literal."""
    for node in ast.parse(finder.read_text()).body:
        match node:
            # Before setuptools 68 the table has no type.
            case ast.Assign(targets=[ast.Name(id="MAPPING")], value=ast.expr() as table):
                break
            case ast.AnnAssign(target=ast.Name(id="MAPPING"), value=ast.expr() as table):
                break
    else:
        raise HpctrainError(
            "HT-pack-finder-unknown", "--pack: {finder} has no table of what it finds", _AS_IT_IS, finder=finder
        )
    return dict(_location(finder, name, Path(path)) for name, path in ast.literal_eval(table).items())


def _location(finder: Path, name: str, path: Path) -> tuple[str, Path]:
    """A module's path among the packages, and its folder or file, which is in the table without its suffix."""
    at = name.replace(".", "/")
    if path.is_dir():
        return at, path
    for file in (path, *(path.with_name(path.name + suffix) for suffix in _MODULES)):
        if file.is_file():
            return at + _suffix(file.name), file
    raise HpctrainError(
        "HT-pack-file-missing",
        "--pack: {finder} finds {name} at {path}, where nothing is",
        _AS_IT_IS,
        finder=finder,
        name=name,
        path=path,
    )


def _suffix(name: str) -> str:
    """The suffix of a module's file, the longest that fits, such as .cpython-311-x86_64-linux-gnu.so."""
    return max((suffix for suffix in _MODULES if name.endswith(suffix)), key=len, default="")


def _module(name: str, path: Path) -> Iterator[tuple[str, Entry]]:
    if path.is_dir():
        for below, entry in walk(path):
            yield f"{name}/{below}", entry
    else:
        yield name, Entry(source=path.resolve())
