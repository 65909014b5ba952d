"""Coverage-guided fuzzing of each reader of outside data, one after the other.

    make fuzz                                      an hour in all
    make fuzz FUZZ_SECONDS=60 READERS="recipe events"

It needs atheris (https://github.com/google/atheris), in an environment of its own. What is found is kept in
``OUT/READER/found``, a file each, the trace beside it; what was tried in ``OUT/READER/corpus``, from which the next
time goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
# What interprets outside data in Python for the package.
_INSTRUMENTED = ["hpctrain", "yaml", "tarfile", "ClusterShell", "numpy.lib", "PIL", "scipy.io", "json"]
_MOST_BYTES = 16384
_MOST_SECONDS = 10
_MOST_MB = 3000
_WORD = re.compile(rb"[A-Za-z_][\w.-]{2,24}")
_MOST_WORDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", metavar="READER", help="all of support/fuzz/outside_readers.py if none")
    parser.add_argument("--seconds", type=int, default=3600, help="over all of the readers")
    parser.add_argument("--out", type=Path, default=Path("fuzz"))
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        _fuzz(options.readers[0], options.out, options.seconds)
        return 0
    from support.fuzz.outside_readers import READERS

    names = options.readers or list(READERS)
    found = sum(_run(name, options.out, options.seconds // len(names)) for name in names)
    return 1 if found else 0


def _run(name: str, out: Path, seconds: int) -> int:
    """Fuzz one reader in a process of its own, which a crash of a library would take along; how much was found."""
    folder = out / name
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    (folder / "found").mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--in-this-process", "--seconds", str(seconds), "--out", str(out), name]
    with (folder / "log").open("w") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=2 * seconds + 300, check=False)
    text = (folder / "log").read_text(errors="replace")
    runs = re.findall(r"^#(\d+)\s.*?cov: (\d+)", text, re.MULTILINE) or [("0", "0")]
    # Faults that were caught have their trace beside them; crash-, timeout- and oom- are libFuzzer's.
    found = sum(path.suffix == ".txt" or "-" in path.name for path in (folder / "found").iterdir())
    print(
        f"{name:16} {runs[-1][0]:>9} runs  {runs[-1][1]:>6} edges  {found:>3} found  exit {ended.returncode}",
        flush=True,
    )
    return found


def _fuzz(name: str, out: Path, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED):
        from hpctrain.common.errors import HpctrainError
        from support.fuzz import outside_readers

        reader = outside_readers.READERS[name]
        seeds = [seed for seed in reader.seeds() if len(seed) <= 8 * _MOST_BYTES]
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
        for seed in seeds:
            _attempt(reader, seed, folder, HpctrainError)
    target = out / name
    for seed in seeds:
        (target / "corpus" / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    words = sorted({word for seed in seeds for word in _WORD.findall(seed)})[:_MOST_WORDS]
    (target / "words").write_text("".join(f'"{word.decode()}"\n' for word in words))
    seen: set[str] = set()

    def once(content: bytes) -> None:
        fault = _attempt(reader, content, folder, HpctrainError)
        if fault is not None and (place := _place(fault)) not in seen:
            seen.add(place)
            name = hashlib.sha256(place.encode()).hexdigest()[:12]
            (target / "found" / name).write_bytes(content)
            (target / "found" / f"{name}.txt").write_text("".join(traceback.format_exception(fault)))

    most = max(_MOST_BYTES, *map(len, seeds))
    atheris.Setup(
        [
            sys.argv[0],
            str(target / "corpus"),
            f"-dict={target / 'words'}",
            f"-artifact_prefix={target / 'found'}/",
            f"-max_total_time={seconds}",
            f"-timeout={_MOST_SECONDS}",
            f"-rss_limit_mb={_MOST_MB}",
            f"-max_len={most}",
            "-print_final_stats=1",
        ],
        once,
    )
    atheris.Fuzz()


def _attempt(reader: object, content: bytes, folder: Path, expected: type[Exception]) -> BaseException | None:
    try:
        reader.read(content, folder)  # type: ignore[attr-defined]
    except expected:
        return None
    except (Exception, RecursionError) as error:
        return error
    return None


def _place(fault: BaseException) -> str:
    """Where a fault is of: its kind, and the innermost line of the package that it passed."""
    passed = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)]
    file, line = next(place for place in [*reversed(passed), ("", 0)] if "/hpctrain/" in place[0] or not place[0])
    return f"{type(fault).__name__} {file}:{line}"


if __name__ == "__main__":
    sys.exit(main())
