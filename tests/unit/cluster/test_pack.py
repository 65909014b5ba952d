"""Packed environments: what is in them, what they are called, and that they run where they are unpacked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parents[3]
_PACK = """
import json, sys
from hpctrain.cluster.pack import find_pack
from hpctrain.errors import HpctrainError
try:
    pack = find_pack()
    if sys.argv[1:]:
        pack.write(lambda line: None)
    print(json.dumps([pack.digest, str(pack.archive)]))
except HpctrainError as error:
    print(json.dumps([str(error), ""]))
"""


def wheel(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """A wheel with these files; its only metadata is what pip insists on."""
    info = f"{name}-1.dist-info"
    more = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for each, text in {**files, **more}.items():
            file.writestr(each, text)
        file.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in (*files, *more)))
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with one small package, which has a program and reads a file of its own."""
    place = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    code = "import pathlib, sys\n\ndef main():\n    print('small', sys.prefix, pathlib.Path(__file__).parent)\n"
    package = wheel(tmp_path, "small", {"small/__init__.py": code, "small/data.txt": "data"})
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(package)], check=True)
    return place


def site(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3.*/site-packages")
    return found


def pack(environment: Path, *, write: bool = False) -> tuple[str, Path]:
    """The digest, or what was wrong, and the archive."""
    cache = environment.parent / "cache"
    variables = {**os.environ, "PYTHONPATH": str(_CHECKOUT), "XDG_CACHE_HOME": str(cache)}
    command = [str(environment / "bin" / "python"), "-c", _PACK, *(["write"] if write else [])]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    digest, archive = json.loads(done.stdout)
    return digest, Path(archive)


def unpack(archive: Path, folder: Path) -> Path:
    """As a job's nodes do it."""
    folder.mkdir()
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(folder)], check=True)
    with (folder / "pyvenv.cfg").open("a") as file:
        file.write(f"home = {folder}/base/bin\n")
    return folder


def said(*command: object) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, check=True).stdout


def test_it_runs_without_the_original(environment: Path, tmp_path: Path) -> None:
    outside = tmp_path / "checkout" / "edited"
    outside.mkdir(parents=True)
    (outside / "__init__.py").write_text("VALUE = 7")
    (outside / "link.txt").symlink_to(outside / "__init__.py")
    (site(environment) / "edited.pth").write_text(f"{outside.parent}\n")
    _, archive = pack(environment, write=True)
    environment.rename(tmp_path / "moved")
    outside.rename(tmp_path / "edited-moved")
    copy = unpack(archive, tmp_path / "a copy")
    where = """
        import edited, json, os, small, ssl, sys
        maps = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if line.count("/") > 1}
        modules = [module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]
        print(json.dumps([edited.VALUE, sys.prefix, sys.base_prefix, sys.path[1:], modules, sorted(maps)]))
    """
    said(copy / "bin" / "python", "-c", textwrap.dedent(where))
    value, prefix, base, path, modules, maps = json.loads(said(copy / "bin" / "python", "-c", textwrap.dedent(where)))
    assert (value, prefix, base) == (7, str(copy), str(copy / "base"))
    assert [each for each in (*path, *modules) if not each.startswith(f"{copy}/")] == []
    # Python's own library too, where it is one; the rest is the system's.
    assert [each for each in maps if "python" in each and not each.startswith(f"{copy}/")] == []
    # Called from elsewhere, by a link to it.
    (tmp_path / "link").symlink_to(copy / "bin" / "small")
    assert said(tmp_path / "link") == f"small {copy} {site(copy)}/small\n"
    assert (site(copy) / "small" / "data.txt").read_text() == "data"


def test_compiled_modules_are_taken_and_are_valid(environment: Path, tmp_path: Path) -> None:
    """Also of what was never compiled, and of what was compiled before it was changed."""
    (site(environment) / "fresh.py").write_text("VALUE = 1")
    changed = site(environment) / "small" / "__init__.py"
    changed.write_text(changed.read_text() + "VALUE = 2\n")
    (site(environment) / "no_python.py").write_text("this is none")
    copy = unpack(pack(environment, write=True)[1], tmp_path / "copy")
    program = "import fresh, small, json; print(fresh.VALUE, small.VALUE)"
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.pyc")}
    assert {path.name.split(".")[0] for path in before} >= {"fresh", "__init__", "os"}
    assert said(copy / "bin" / "python", "-v", "-c", program) == "1 2\n"
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.pyc")} == before, "nothing was compiled again"


def test_the_name_is_that_of_the_content(environment: Path, tmp_path: Path) -> None:
    first, archive = pack(environment, write=True)
    made = archive.stat().st_mtime_ns, archive.stat().st_ino
    assert pack(environment, write=True) == (first, archive)
    assert archive.stat().st_ino == made[1], "not made again"
    # What Python writes beside its sources changes nothing, nor does the time of a file.
    said(environment / "bin" / "python", "-c", "import small, turtledemo")
    os.utime(site(environment) / "small" / "data.txt")
    assert pack(environment)[0] == first
    state = (site(environment) / "small" / "data.txt").stat()
    # The same length at the same time.
    (site(environment) / "small" / "data.txt").write_text("dada")
    os.utime(site(environment) / "small" / "data.txt", ns=(state.st_atime_ns, state.st_mtime_ns))
    second, other = pack(environment)
    assert second != first
    assert not other.exists(), "only looked at"
    (site(environment) / "small" / "data.txt").write_text("data")
    (site(environment) / "small" / "data.txt").chmod(0o755)
    assert pack(environment)[0] not in (first, second)
    (site(environment) / "small" / "data.txt").chmod(0o644)
    assert pack(environment)[0] == first
    # A copy elsewhere is the same environment.
    subprocess.run(["cp", "-a", str(environment), str(tmp_path / "other")], check=True)
    for script in (tmp_path / "other" / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            script.write_text(script.read_text().replace(str(environment), str(tmp_path / "other")))
    assert pack(tmp_path / "other")[0] == first


def test_a_damaged_or_cut_off_archive_is_made_again(environment: Path) -> None:
    _, archive = pack(environment, write=True)
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1])
    pack(environment, write=True)
    assert archive.read_bytes() == whole, "the same environment gives the same bytes"


FINDER = """\
from __future__ import annotations
MAPPING: dict[str, str] = {{'mapped': {folder!r}, 'module': {module!r}}}
NAMESPACES: dict[str, list[str]] = {{}}
def install(): pass
"""


def test_an_editable_of_setuptools(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "src" / "mapped").mkdir(parents=True)
    (tmp_path / "src" / "mapped" / "__init__.py").write_text("VALUE = 3")
    module = tmp_path / "src" / "module.py"
    module.write_text("VALUE = 4")
    finder = FINDER.format(folder=str(tmp_path / "src" / "mapped"), module=str(module))
    (site(environment) / "__editable___mapped_1_finder.py").write_text(finder)
    install = "import __editable___mapped_1_finder; __editable___mapped_1_finder.install()"
    (site(environment) / "__editable__.mapped-1.pth").write_text(install)
    (site(environment) / "hpctrain.pth").write_text(f"{_CHECKOUT}\n")
    _, archive = pack(environment, write=True)
    shutil.rmtree(tmp_path / "src")
    copy = unpack(archive, tmp_path / "copy")
    # hpctrain's templates are beside its package in a checkout, and in it in a wheel.
    assert (site(copy) / "hpctrain" / "slurm" / "job.sh.j2").exists()
    assert said(copy / "bin" / "python", "-c", "import mapped, module; print(mapped.VALUE, module.VALUE)") == "3 4\n"


def test_what_cannot_be_packed_is_refused(environment: Path) -> None:
    info = site(environment) / "odd-1.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text('{"url": "file:///src/odd", "dir_info": {"editable": true}}')
    (info / "RECORD").write_text("odd-editable.pth,,\n")
    (site(environment) / "odd-editable.pth").write_text("import small")
    assert "odd is an editable installation of a kind" in pack(environment)[0]
    (environment / "conda-meta").mkdir()
    assert "conda-pack" in pack(environment)[0]
