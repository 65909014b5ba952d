"""Lists the files of a copy of this virtual environment that runs on its own: all of it, its Python, its editables.

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
from collections import ChainMap
from collections.abc import Container, Iterator
from os.path import relpath
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.control.packing.entries import Entry, walk

_BASE = "base"
# Left out of the interpreter's library: other packages, its tests, and the files for embedding it in programs.
_NOT_OF_BASE = re.compile(r"site-packages|dist-packages|test|config-.*")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Left out because they name the folder of the original.
_ACTIVATION = re.compile(r"[Aa]ctivate(\..*)?")
# The first lines that pip and uv write, also pip's for long paths, perhaps with options of Python.
_SHEBANG = re.compile(
    rb"#!(?:/bin/sh\n'''exec' )?\"?(?P<python>/[^\n\"]*?/python[0-9.]*)\"?(?P<options>(?: -\w+)*)"
    rb"(?: \"\$0\" \"\$@\"\n' ''')? *\n"
)
_RELOCATABLE = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/python%s "$0" "$@"
' '''
"""
# In a checkout the templates are beside the package.
_TEMPLATES = Path(__file__).resolve().parents[3] / "slurm"
# The header of a .pyc: https://peps.python.org/pep-0552/
_HEADER_BYTES = 16


def environment_entries() -> dict[str, Entry]:
    """All files and links of a copy of this environment, by their paths in it; without compiled modules.

    Raises:
        HpctrainError: this Python is in no virtual environment, or one whose parts cannot all be found.
        OSError: a file or folder cannot be read.
    """
    _require_virtual_environment()
    prefix = Path(sys.prefix).resolve()
    entries = {name: _relocatable(prefix, name, entry) for name, entry in walk(prefix) if not _is_replaced(name)}
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        entries[f"bin/{name}"] = Entry(link=f"../{_BASE}/bin/{base.name}")
    entries["pyvenv.cfg"] = Entry(content=f"include-system-site-packages = {_uses_base()}\n".lower().encode())
    entries |= _interpreter(base)
    site = Path(sysconfig.get_path("purelib")).resolve()
    entries |= editable_entries(prefix, site, entries)
    package = f"{site.relative_to(prefix).as_posix()}/hpctrain"
    if f"{package}/__init__.py" in entries and _TEMPLATES.is_dir():
        # A wheel has the templates inside of the package.
        entries |= {f"{package}/slurm/{name}": entry for name, entry in walk(_TEMPLATES)}
    return entries


def compiled(source: Path) -> Entry | None:
    """The compiled module of a source file, the existing one if it is valid; None if the file does not compile."""
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
    # The interpreter's own libraries too: conda's has more than the standard library and libpython.
    for place in dict.fromkeys((sys.prefix, sys.base_prefix)):
        if (Path(place) / "conda-meta").exists():
            raise HpctrainError(
                "HT-pack-not-possible",
                "--pack packs virtual environments of a Python without conda, and {path} is conda's",
                "conda-pack makes an archive of such an environment, which --stage-environment takes",
                path=place,
            )
    if sys.prefix == sys.base_prefix:
        raise HpctrainError(
            "HT-pack-not-possible",
            "--pack packs a virtual environment, and {executable} is in none",
            "python3 -m venv .venv, install hpctrain there, and submit with it",
            executable=sys.executable,
        )
    if _uses_base() and any(Path(sys.base_prefix).glob("lib/python3/dist-packages")):
        raise HpctrainError(
            "HT-pack-not-possible",
            "--pack: {prefix} also uses the packages of the system, which are not packed",
            "make an environment without --system-site-packages",
            prefix=sys.prefix,
        )


def _uses_base() -> bool:
    """Whether the environment also sees the packages that its interpreter has."""
    lines = (Path(sys.prefix) / "pyvenv.cfg").read_text().lower().splitlines()
    return any(re.fullmatch(r"include-system-site-packages\s*=\s*true\s*", line) for line in lines)


def _is_replaced(name: str) -> bool:
    """Whether the copy gets another file there, or none."""
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
    return Entry(content=_RELOCATABLE % match["options"] + rest, executable=entry.executable)


def _interpreter(binary: Path) -> dict[str, Entry]:
    """The interpreter and its library in ``base/``."""
    base = Path(sys.base_prefix).resolve()
    entries: dict[str, Entry] = {}
    for kind in ("stdlib", "platstdlib"):
        # Asked for by the base, because the default paths have the environment's prefix.
        library = Path(sysconfig.get_path(kind, vars={"base": str(base), "platbase": str(base)})).resolve()
        if not library.is_relative_to(base):
            raise HpctrainError(
                "HT-pack-not-possible",
                "--pack: the library of {binary} is at {library}, and not below {base}",
                binary=binary,
                library=library,
                base=base,
            )
        at = library.relative_to(base).as_posix()
        without = {each.name for each in library.iterdir() if _NOT_OF_BASE.fullmatch(each.name)}
        if _uses_base():
            without -= {"site-packages", "dist-packages"}
        entries |= {f"{_BASE}/{at}/{name}": entry for name, entry in walk(library, without=without)}
    shared = _shared_library(base)
    if shared:
        entries[f"{_BASE}/lib/{shared.name}"] = Entry(source=shared)
    entries[f"{_BASE}/bin/{binary.name}"] = Entry(content=_with_relative_library(binary, shared), executable=True)
    return entries


def _shared_library(base: Path) -> Path | None:
    """libpython of an interpreter outside of the system; the system's own one is on each node."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or base == Path("/usr"):
        return None
    path = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
    return path if path.is_file() else None


def _with_relative_library(binary: Path, shared: Path | None) -> bytes:
    """The program, made to look for libpython in the ``lib/`` beside it, as ``chrpath`` does it."""
    content = binary.read_bytes()
    if shared is None:
        return content
    for folder in {str(shared.parent), str(shared.parent.resolve())}:
        old, new = os.fsencode(folder) + b"\0", b"$ORIGIN/../lib\0"
        if len(old) >= len(new):
            content = content.replace(old, new.ljust(len(old), b"\0"))
    return content


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
                "HT-pack-not-possible",
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
                    "HT-pack-not-possible",
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
            "HT-pack-not-possible", "--pack: {finder} has no table of what it finds", _AS_IT_IS, finder=finder
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
        "HT-pack-not-possible",
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
