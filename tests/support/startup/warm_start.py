"""A rank begins in an interpreter that has its framework imported already; see tests/support/warm_interpreters.py.

The process that a launcher started hands over what it is (arguments, environment, directory, open files, limits) and
stays where it is, for the launcher's sake: signals of the launcher go on to the rank, the end of either is the end of
the other. On a host of the tests the rank joins the host's namespaces. What differs in more begins as it would without.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DIRECTORY = "HPCTRAIN_WARM_INTERPRETERS"
"""The environment variable that names the folder of the servers' sockets."""

SERVERS = ("torch", "tensorflow")
MAPPING_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""glibc reads it when a process starts; a rank can set the same later."""

_IMPORTS = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
_FRAMEWORK_OF = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
THREADS, LOG_LEVEL = "OMP_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL"
# What PyTorch and TensorFlow read when they are imported, and the value that the servers have for it. PyTorch can take
# another number of threads later, and TensorFlow has its own.
READ_AT_IMPORT = {THREADS: "1", LOG_LEVEL: "2"}
# mpirun of a wheel adds its own folder, once or more often.
LIBRARIES = os.pathsep.join(filter(None, (f"{sys.prefix}/lib", os.environ.get("LD_LIBRARY_PATH"))))
_ALSO_READ = re.compile(
    rf"LD_|(?!{MAPPING_THRESHOLD}$)MALLOC_|KERAS_|XLA_|TORCH(?!ELASTIC_|_NCCL_|INDUCTOR_CACHE_DIR$)|CUDA"
    r"|PYTHON(?!PATH$|UNBUFFERED$|HASHSEED$|DONTWRITEBYTECODE$)"
)
_TRAIN = "hpctrain.worker.train"
_TORCHRUNS = ("hpctrain.worker.programs.torchrun", "torch.distributed.run")
HEADER = struct.Struct("!II")
_SECONDS = 120.0


def socket_path(directory: str, framework: str, seed: int) -> str:
    """Where the server listens whose interpreters have ``framework`` and hash with ``seed``."""
    return f"{directory}/{framework}-{seed}"


def namespaces() -> dict[str, str]:
    """Those that a rank can join, if it has not begun in them."""
    return {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("ipc", "mnt", "net", "pid", "uts")}


def surroundings() -> dict[str, str]:
    """What a process cannot hand over to another one, or not after the imports."""
    read = {name: value for name, value in os.environ.items() if _ALSO_READ.match(name)}
    # OpenCV adds a folder that is not there.
    read["LD_LIBRARY_PATH"] = os.pathsep.join(sorted(filter(os.path.isdir, set(LIBRARIES.split(os.pathsep)))))
    return {
        "user": str(Path("/proc/self/ns/user").readlink()),
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "prefix": sys.prefix,
        "uid": str(os.geteuid()),
        **read,
    }


def begin() -> None:
    """Become the relay of a rank in a warm interpreter and end with it, or return where that is not possible."""
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return
    program = _program(sys.orig_argv)
    framework = program and _framework(program)
    if not program or framework is None or not _is_usual(framework):
        return
    # As ranks of separate interpreters, those side by side have other orders of the elements of a set.
    seed = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("SLURM_PROCID") or 0) % 2
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(_SECONDS)
        server.connect(socket_path(directory, framework, seed))
        _send(server, {**_state(before), **program})
        if answer := server.recv(HEADER.size):
            _relay(server, HEADER.unpack(answer)[0])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _program(command: list[str]) -> dict[str, Any] | None:
    """The module or script that the interpreter is to run, where its command line has no unusual option."""
    flags = [*itertools.takewhile(("-P", "-u").__contains__, command[1:])]
    words = command[1 + len(flags) :]
    given = {"unbuffered": "-u" in flags}
    if words[:1] == ["-m"] and words[1] in (_TRAIN, *_TORCHRUNS):
        front = None if "-P" in flags else str(Path.cwd())
        return {**given, "module": words[1], "arguments": words[1:], "front": front}
    if words and words[0].endswith(".py") and "-P" not in flags:
        return {**given, "script": words[0], "arguments": words, "front": str(Path(words[0]).resolve().parent)}
    return None


def _framework(program: dict[str, Any]) -> str | None:
    """The server that has what the program imports; where its imports do not tell, its arguments may."""
    try:
        if program.get("module") in _TORCHRUNS:
            return "torch"
        if "script" in program:
            named = (word.partition("=")[0] for word in program["arguments"][1:])
            return _only(_imports(Path(program["script"]))) or _only(named)
        plan = json.loads((Path(program["arguments"][1]) / "plan.json").read_bytes())
        return _only([plan["framework"]] if plan["recipe"] else _imports(Path(plan["script"]["path"])))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _only(names: Iterable[str]) -> str | None:
    frameworks = {_FRAMEWORK_OF[name] for name in names if name in _FRAMEWORK_OF}
    return frameworks.pop() if len(frameworks) == 1 else None


def _imports(script: Path) -> set[str]:
    """What a script imports, by itself or by scripts beside it."""
    found: set[str] = set()
    waiting = [script]
    while waiting:
        new = set(_IMPORTS.findall(waiting.pop().read_text())) - found
        found |= new
        waiting += filter(Path.is_file, (script.with_name(f"{name}.py") for name in new))
    return found


def _is_usual(framework: str) -> bool:
    usual = True
    if framework == "torch":
        usual = os.environ.get(THREADS, "1").isdecimal()
    elif framework == "tensorflow":
        usual = os.environ.get(LOG_LEVEL) == READ_AT_IMPORT[LOG_LEVEL]
    return usual and "PYTHONHASHSEED" not in os.environ


def _state(mask: set[int]) -> dict[str, Any]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {
        "surroundings": surroundings(),
        "namespaces": namespaces(),
        "environment": dict(os.environ),
        "path": sys.path,
        "directory": str(Path.cwd()),
        "command": sys.orig_argv,
        "umask": int(status["Umask"], 8),
        "ignored": [number for number in signal.valid_signals() if int(status["SigIgn"], 16) >> (number - 1) & 1],
        "blocked": sorted(mask),
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": [(number, resource.getrlimit(number)) for number in limits.values()],
    }


def _send(server: socket.socket, state: dict[str, Any]) -> None:
    files = [number for entry in Path("/proc/self/fd").iterdir() if _is_open(number := int(entry.name), server)]
    text = json.dumps({**state, "files": files}).encode()
    socket.send_fds(server, [HEADER.pack(len(text), len(files))], files)
    server.sendall(text)


def _is_open(number: int, server: socket.socket) -> bool:
    # The listing's own is closed again.
    with contextlib.suppress(OSError):
        return number != server.fileno() and bool(os.fstat(number))
    return False


def _relay(server: socket.socket, rank: int) -> None:
    """Stay until the rank ends, and end as it does."""
    server.setblocking(False)
    fcntl.fcntl(server, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(server, fcntl.F_SETFL, fcntl.fcntl(server, fcntl.F_GETFL) | os.O_ASYNC)
    launcher = os.getppid()
    while True:
        with contextlib.suppress(BlockingIOError):
            answer = server.recv(HEADER.size)
            if not answer:
                os._exit(1)
            end_as(HEADER.unpack(answer)[0])
        received = signal.sigwaitinfo(signal.valid_signals() - {signal.SIGCHLD})
        # Whoever knows the rank by its number has sent it there too; the launcher knows this process alone, and a
        # terminal's come from no process.
        if received.si_signo != signal.SIGIO and received.si_pid in (0, launcher):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, received.si_signo)


def end_as(status: int) -> None:
    """End as a process did whose status ``os.waitpid`` gave."""
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
