"""What belongs to this virtual environment, so that a copy runs without it: all of it, its Python, and its editables.

The copy is a virtual environment too, with the interpreter in ``base/``. It runs from any folder once its
``pyvenv.cfg`` has a line ``home = FOLDER/base/bin``: https://docs.python.org/3/library/site.html.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import os
import py_compile
import re
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError

_BASE = "base"
# Of the interpreter's own library: other environments' packages, its tests, and what embeds it in programs.
_NOT_OF_BASE = re.compile(r"site-packages|dist-packages|test|config-.*")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# They name the folder of the original.
_ACTIVATION = re.compile(r"[Aa]ctivate(\..*)?")
# As pip and uv write them, and pip where the path is long.
_SHEBANG = re.compile(
    rb"#!(?:/bin/sh\n'''exec' )?\"?(?P<python>/[^\n\"]*?/python[0-9.]*)\"?(?: \"\$0\" \"\$@\"\n' ''')?\n"
)
_RELOCATABLE = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/python "$0" "$@"
' '''
"""
# Beside the package in a checkout.
_TEMPLATES = Path(__file__).resolve().parents[2] / "slurm"
_MODULES = tuple(importlib.machinery.all_suffixes())
# Of a .pyc: https://peps.python.org/pep-0552/
_HEADER_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file or link of the copy: a file as it is at ``source``, ``content``, or a link to ``link``."""

    source: Path | None = None
    content: bytes | None = None
    link: str | None = None
    executable: bool = False


def environment_entries() -> dict[str, Entry]:
    """All files and links of a copy of this environment, by their paths in it; without compiled modules.

    Raises:
        HpctrainError: this Python is in no virtual environment, or one whose parts cannot all be found.
    """
    _require_virtual_environment()
    prefix = Path(sys.prefix).resolve()
    entries = {name: _relocatable(prefix, name, entry) for name, entry in _walk(prefix) if not _is_own(name)}
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        entries[f"bin/{name}"] = Entry(link=f"../{_BASE}/bin/{base.name}")
    entries["pyvenv.cfg"] = Entry(content=f"include-system-site-packages = {_uses_base()}\n".lower().encode())
    entries |= _interpreter(base)
    site = Path(sysconfig.get_path("purelib")).resolve()
    entries |= _editables(prefix, site)
    package = f"{site.relative_to(prefix).as_posix()}/hpctrain"
    if f"{package}/__init__.py" in entries and _TEMPLATES.is_dir():
        # Where a wheel has them.
        entries |= {f"{package}/slurm/{name}": entry for name, entry in _walk(_TEMPLATES)}
    return entries


def compiled(source: Path) -> Entry | None:
    """The compiled module of a source file, that which is there if it is valid; None for what is no Python."""
    path = Path(importlib.util.cache_from_source(str(source)))
    state = source.stat()
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError:
        header = b""
    dated = int(state.st_mtime).to_bytes(8, "little")[:4] + state.st_size.to_bytes(8, "little")[:4]
    if header == importlib.util.MAGIC_NUMBER + bytes(4) + dated:
        return Entry(source=path)
    with tempfile.TemporaryDirectory(prefix="hpctrain-pack-") as folder, warnings.catch_warnings(action="ignore"):
        made = Path(folder, "made.pyc")
        # Valid for any time of its source, which is not looked at again: https://peps.python.org/pep-0552/
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        try:
            py_compile.compile(str(source), str(made), doraise=True, invalidation_mode=unchecked)
        except py_compile.PyCompileError:
            return None
        return Entry(content=made.read_bytes())


def _require_virtual_environment() -> None:
    if (Path(sys.prefix) / "conda-meta").exists():
        raise HpctrainError(
            f"--pack packs virtual environments, and {sys.prefix} is one of conda",
            "conda-pack makes an archive of it, which --stage-environment takes",
        )
    if sys.prefix == sys.base_prefix:
        raise HpctrainError(
            f"--pack packs a virtual environment, and {sys.executable} is in none",
            "python3 -m venv .venv, install hpctrain there, and submit with it",
        )
    if _uses_base() and any(Path(sys.base_prefix).glob("lib/python3/dist-packages")):
        raise HpctrainError(
            f"--pack: {sys.prefix} also uses the packages of the system, which are not packed",
            "make an environment without --system-site-packages",
        )


def _uses_base() -> bool:
    """Whether the environment also sees the packages that its interpreter has."""
    lines = (Path(sys.prefix) / "pyvenv.cfg").read_text().lower().splitlines()
    return any(re.fullmatch(r"include-system-site-packages\s*=\s*true\s*", line) for line in lines)


def _walk(
    folder: Path, *, without: Container[str] = (), within: frozenset[Path] = frozenset()
) -> Iterator[tuple[str, Entry]]:
    """The entries of a folder by their relative paths. Links that lead out of it become what they lead to.

    Args:
        without: what to pass over right in the folder.
        within: folders that this one was reached from.
    """
    root = folder.resolve()
    for parent, folders, files in os.walk(root):
        here = Path(parent)
        folders[:] = [name for name in folders if name != "__pycache__" and (here != root or name not in without)]
        for name in (*folders, *files):
            path = here / name
            inside = path.relative_to(root).as_posix()
            if not path.is_symlink():
                if path.is_file():
                    yield inside, Entry(source=path, executable=os.access(path, os.X_OK))
                continue
            target = path.resolve()
            if target.is_relative_to(root):
                yield inside, Entry(link=os.path.relpath(target, here))
            elif target.is_file():
                yield inside, Entry(source=target, executable=os.access(target, os.X_OK))
            elif target.is_dir() and not any(target in (each, *each.parents) for each in (root, *within)):
                for below, entry in _walk(target, within=within | {root}):
                    yield f"{inside}/{below}", entry


def _is_own(name: str) -> bool:
    """Whether the copy has a file of its own there, or none."""
    folder, _, file = name.rpartition("/")
    return name == "pyvenv.cfg" or (folder == "bin" and bool(_PYTHON.fullmatch(file) or _ACTIVATION.fullmatch(file)))


def _relocatable(prefix: Path, name: str, entry: Entry) -> Entry:
    """The entry; a script of ``bin/`` starts the Python that is beside it."""
    if not name.startswith("bin/") or entry.source is None:
        return entry
    with entry.source.open("rb") as file:
        start = file.read(4096)
        match = _SHEBANG.match(start)
        if match is None or Path(os.fsdecode(match["python"])).parent.resolve() != prefix / "bin":
            return entry
        rest = start[match.end() :] + file.read()
    return Entry(content=_RELOCATABLE + rest, executable=entry.executable)


def _interpreter(binary: Path) -> dict[str, Entry]:
    """The interpreter and its library in ``base/``."""
    base = Path(sys.base_prefix).resolve()
    entries: dict[str, Entry] = {}
    for kind in ("stdlib", "platstdlib"):
        # Those of the environment have its prefix.
        library = Path(sysconfig.get_path(kind, vars={"base": str(base), "platbase": str(base)})).resolve()
        if not library.is_relative_to(base):
            raise HpctrainError(f"--pack: the library of {binary} is at {library}, and not below {base}")
        at = library.relative_to(base).as_posix()
        without = {each.name for each in library.iterdir() if _NOT_OF_BASE.fullmatch(each.name)}
        if _uses_base():
            without -= {"site-packages", "dist-packages"}
        entries |= {f"{_BASE}/{at}/{name}": entry for name, entry in _walk(library, without=without)}
    shared = _shared_library(base)
    if shared:
        entries[f"{_BASE}/lib/{shared.name}"] = Entry(source=shared)
    entries[f"{_BASE}/bin/{binary.name}"] = Entry(content=_beside(binary, shared), executable=True)
    return entries


def _shared_library(base: Path) -> Path | None:
    """libpython of an interpreter of one's own; that of the system is on each node."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or base == Path("/usr"):
        return None
    path = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
    return path if path.is_file() else None


def _beside(binary: Path, shared: Path | None) -> bytes:
    """The program, made to look for libpython in the ``lib/`` beside it, as ``chrpath`` does it."""
    content = binary.read_bytes()
    if shared is None:
        return content
    for folder in {str(shared.parent), str(shared.parent.resolve())}:
        old, new = os.fsencode(folder) + b"\0", b"$ORIGIN/../lib\0"
        if len(old) >= len(new):
            content = content.replace(old, new.ljust(len(old), b"\0"))
    return content


def _editables(prefix: Path, site: Path) -> dict[str, Entry]:
    """What ``.pth`` files add to the path from elsewhere, put among the packages, and the files without those lines."""
    entries: dict[str, Entry] = {}
    at = site.relative_to(prefix).as_posix()
    resolved = set()
    for path in sorted(site.glob("*.pth")):
        kept = []
        for line in path.read_text(errors="surrogateescape").splitlines():
            finder = re.match(r"import (__editable___\w+_finder)\b", line)
            folder = (site / line.strip()).resolve() if line.strip() and not line.startswith(("#", "import")) else None
            if finder:
                found = _mapped(site / f"{finder[1]}.py")
            elif folder and folder.is_dir() and not folder.is_relative_to(prefix):
                found = _modules(folder)
            else:
                inside = folder is not None and folder.is_relative_to(prefix)
                kept.append(os.path.relpath(folder, site) if folder and inside else line)
                resolved |= {path.name} if inside else set()
                continue
            resolved.add(path.name)
            for name, package in found.items():
                entries |= _module(f"{at}/{name}", package)
        entries[f"{at}/{path.name}"] = Entry(content="\n".join([*kept, ""]).encode(errors="surrogateescape"))
    _require_resolved(site, resolved)
    return entries


def _require_resolved(site: Path, resolved: set[str]) -> None:
    for installed in sorted(site.glob("*.dist-info/direct_url.json")):
        if json.loads(installed.read_text()).get("dir_info", {}).get("editable"):
            record = (installed.parent / "RECORD").read_text().splitlines()
            if resolved.isdisjoint(line.partition(",")[0] for line in record):
                project = installed.parent.name.partition("-")[0]
                raise HpctrainError(
                    f"--pack: {project} is an editable installation of a kind whose files cannot be found",
                    "install it as it is: pip install --force-reinstall --no-deps FOLDER",
                )


def _modules(folder: Path) -> dict[str, Path]:
    """The packages and modules of a folder by name."""
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if (path / "__init__.py").is_file() or (path.is_file() and path.name.endswith(_MODULES))
    }


def _mapped(finder: Path) -> dict[str, Path]:
    """What the finder of an editable installation by setuptools maps; it is generated, and its table is a literal."""
    for node in ast.parse(finder.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "MAPPING":
            mapping = ast.literal_eval(node.value) if node.value else {}
            found = {name.replace(".", "/"): Path(place) for name, place in mapping.items()}
            return {name + path.suffix if path.is_file() else name: path for name, path in found.items()}
    return {}


def _module(name: str, path: Path) -> dict[str, Entry]:
    if path.is_dir():
        return {f"{name}/{below}": entry for below, entry in _walk(path)}
    return {name: Entry(source=path.resolve())}
