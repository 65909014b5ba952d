"""Packed environments: what is in them, what they are called, and that they run where they are unpacked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from support.refusals import check

pytestmark = pytest.mark.slow

_CHECKOUT = Path(__file__).parents[4]
_PACK = """
import json, sys
from hpctrain.control.packing.pack import find_pack
from hpctrain.common.errors import HpctrainError
try:
    pack = find_pack()
    exec(sys.argv[1])
    if sys.argv[2:]:
        pack.write(lambda line: None)
    print(json.dumps([pack.digest, str(pack.archive)]))
except HpctrainError as error:
    print(json.dumps([json.dumps(error.record()), ""]))
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


def pack(environment: Path, *, write: bool = False, meanwhile: str = "") -> tuple[str, Path]:
    """The digest, or the error's record, and the archive; ``meanwhile`` is run after the environment was looked at."""
    cache = environment.parent / "cache"
    variables = {**os.environ, "PYTHONPATH": str(_CHECKOUT), "XDG_CACHE_HOME": str(cache)}
    command = [str(environment / "bin" / "python"), "-c", _PACK, meanwhile, *(["write"] if write else [])]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    digest, archive = json.loads(done.stdout)
    return digest, Path(archive)


def check_refused(
    environment: Path, code: str, /, *, write: bool = False, meanwhile: str = "", **values: object
) -> None:
    record, _ = pack(environment, write=write, meanwhile=meanwhile)
    check(HpctrainError.from_record(json.loads(record)), code, **values)


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


@pytest.mark.long
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


@pytest.mark.thorough
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


@pytest.mark.long
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


@pytest.mark.long
def test_hashes_of_files_that_were_just_changed_are_not_remembered(environment: Path) -> None:
    """They may be changed again within what the file system tells apart."""
    fresh = site(environment) / "fresh.py"
    time.sleep(2.1)
    fresh.write_text("VALUE = 1")
    pack(environment, write=True)
    (hashes,) = (environment.parent / "cache" / "hpctrain" / "environments").glob("hashes-*.json")
    known = json.loads(hashes.read_text())
    assert str(site(environment) / "small" / "data.txt") in known
    assert str(fresh) not in known


@pytest.mark.long
def test_a_cut_off_archive_is_made_again(environment: Path) -> None:
    _, archive = pack(environment, write=True)
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1])
    pack(environment, write=True)
    assert archive.read_bytes() == whole, "the same environment gives the same bytes"
    # What a full disk or another program left in the cache counts as not there.
    facts = archive.with_name(archive.name.replace(".tar.gz", ".txt"))
    (hashes,) = archive.parent.glob("hashes-*.json")
    known = facts.read_text()
    for damage in ("", "[1, 2]", "a b c", '{"a": 1}'):
        facts.write_text(damage)
        hashes.write_text(damage)
        pack(environment, write=True)
        assert facts.read_text() == known


def add_finder(environment: Path, table: str) -> None:
    """An editable installation as setuptools writes it."""
    finder = f"from __future__ import annotations\n{table}\ndef install(): pass\n"
    (site(environment) / "__editable___mapped_1_finder.py").write_text(finder)
    install = "import __editable___mapped_1_finder; __editable___mapped_1_finder.install()"
    (site(environment) / "__editable__.mapped-1.pth").write_text(install)


@pytest.mark.parametrize("kind", [": dict[str, str]", pytest.param("", marks=pytest.mark.thorough)])
@pytest.mark.long
def test_an_editable_of_setuptools(environment: Path, tmp_path: Path, kind: str) -> None:
    """Its table names modules without their suffix; older versions write it without its type."""
    source = tmp_path / "src"
    (source / "mapped").mkdir(parents=True)
    (source / "mapped" / "__init__.py").write_text("VALUE = 3")
    (source / "module.py").write_text("VALUE = 4")
    mapping = {name: str(source / name) for name in ("mapped", "module")}
    add_finder(environment, f"MAPPING{kind} = {mapping}\nNAMESPACES: dict[str, list[str]] = {{}}")
    (site(environment) / "hpctrain.pth").write_text(f"{_CHECKOUT}\n")
    _, archive = pack(environment, write=True)
    shutil.rmtree(tmp_path / "src")
    copy = unpack(archive, tmp_path / "copy")
    # hpctrain's templates are beside its package in a checkout, and in it in a wheel.
    assert (site(copy) / "hpctrain" / "slurm" / "job.sh.j2").exists()
    program = "import mapped, module; print(mapped.VALUE, module.VALUE)"
    assert said(copy / "bin" / "python", "-c", program) == "3 4\n"


@pytest.mark.thorough
def test_packages_are_those_that_python_finds_first(environment: Path, tmp_path: Path) -> None:
    """The environment's, then those of folders in their order, also within namespaces, then those of a finder."""
    for number, names in enumerate((("small", "ns/one", "first"), ("ns/one", "ns/deep/two", "first"), ("first",))):
        for name in names:
            package = tmp_path / f"src{number}" / name
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(f"VALUE = {number}")
            (package / f"only_in_{number}.py").touch()
    (tmp_path / "src0" / "ns" / "module.py").write_text("VALUE = 5")
    (tmp_path / "src0" / "tests").mkdir()
    (tmp_path / "src0" / "tests" / "only_in_tests.py").touch()
    add_finder(environment, f"MAPPING = {{'first': {str(tmp_path / 'src2' / 'first')!r}}}")
    (site(environment) / "folders.pth").write_text(f"{tmp_path}/src0\n{tmp_path}/src1\n")
    copy = unpack(pack(environment, write=True)[1], tmp_path / "copy")
    program = (
        "from importlib import import_module; import sys; print(*(import_module(name).VALUE for name in sys.argv[1:]))"
    )
    names = ("first", "ns.one", "ns.deep.two", "ns.module")
    assert said(copy / "bin" / "python", "-c", program, *names).split() == ["0", "0", "1", "5"]
    # And nothing of one is among the files of another.
    assert sorted(path.name for path in copy.rglob("only_in_*.py")) == ["only_in_0.py", "only_in_0.py", "only_in_1.py"]


@pytest.mark.thorough
def test_scripts_keep_the_options_of_their_python(environment: Path, tmp_path: Path) -> None:
    """As they stand in the first line, and as pip writes it where the path is odd."""
    python, body = environment / "bin" / "python", "import sys; print(sys.prefix, sys.flags.isolated)\n"
    for name, head in (
        ("short", f"#!{python} -I"),
        ("long", f"#!/bin/sh\n'''exec' \"{python}\" -I \"$0\" \"$@\"\n' '''"),
    ):
        (environment / "bin" / name).write_text(f"{head}\n{body}")
        (environment / "bin" / name).chmod(0o755)
    copy = unpack(pack(environment, write=True)[1], tmp_path / "copy")
    assert said(copy / "bin" / "short") == said(copy / "bin" / "long") == f"{copy} 1\n"


@pytest.mark.long
def test_a_link_to_itself_is_a_link(environment: Path) -> None:
    (site(environment) / "small" / "around").symlink_to("around")
    assert len(pack(environment)[0]) == 32


NO_FOLDER = """\
import os
def scandir(path=".", found=os.scandir):
    if str(path).endswith("/small"):
        raise PermissionError(13, "Permission denied", str(path))
    return found(path)
os.scandir = scandir
"""


def test_what_cannot_be_read_is_named(environment: Path) -> None:
    data = site(environment) / "small" / "data.txt"
    remove = f"import os; os.remove({str(data)!r})"
    check_refused(environment, "HT-file-unreadable", write=True, meanwhile=remove, path=data)
    (site(environment) / "sitecustomize.py").write_text(NO_FOLDER)
    check_refused(environment, "HT-file-unreadable", path=data.parent, reason="Permission denied")


@pytest.mark.long
def test_what_cannot_be_packed_is_refused(environment: Path, tmp_path: Path) -> None:
    info = site(environment) / "odd-1.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text('{"url": "file:///src/odd", "dir_info": {"editable": true}}')
    (info / "RECORD").write_text("odd-editable.pth,,\n")
    (site(environment) / "odd-editable.pth").write_text("import small")
    check_refused(environment, "HT-pack-not-possible", project="odd")
    shutil.rmtree(info)
    (site(environment) / "odd-editable.pth").write_text(f"import site; site.addsitedir({str(_CHECKOUT)!r})")
    check_refused(environment, "HT-pack-not-possible", paths=str(_CHECKOUT))
    (site(environment) / "odd-editable.pth").unlink()
    add_finder(environment, "MAPPING = {'gone': '/nowhere/gone'}")
    check_refused(environment, "HT-pack-not-possible", name="gone", path="/nowhere/gone")
    add_finder(environment, "TABLE = {}")
    check_refused(environment, "HT-pack-not-possible")
    (tmp_path / "base" / "conda-meta").mkdir(parents=True)
    (site(environment) / "base.pth").write_text(f"import sys; sys.base_prefix = {str(tmp_path / 'base')!r}")
    check_refused(environment, "HT-pack-not-possible", path=tmp_path / "base")
    (tmp_path / "base" / "conda-meta").rmdir()
    (tmp_path / "base" / "lib" / "python3" / "dist-packages").mkdir(parents=True)
    settings = environment / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace("packages = false", "packages = true"))
    check_refused(environment, "HT-pack-not-possible", prefix=environment)
    (environment / "conda-meta").mkdir()
    check_refused(environment, "HT-pack-not-possible", path=environment)
