"""Interpreters that have imported PyTorch, or TensorFlow with Keras, or what writes curves, and wait to become ranks.

Importing them takes 5 and 3 s of processor time, the compiler of PyTorch and scikit-learn included, in each rank of
each test. ``python warm_interpreters.py PARENT DIRECTORY`` listens in a folder. A rank that begins with
``HPCTRAIN_WARM_INTERPRETERS=DIRECTORY`` in its environment (see startup/warm_start.py) becomes a fork of a process that
has imported them. Each rank is a process of its own that nobody used before: no state goes from one test to the next.
A rank on one of the tests' hosts (see hosts/local_hosts.py) joins the namespaces of that host before anything else.

A server of a framework starts with the first rank that wants it, and all end with the process that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import platform
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("startup")))

import warm_start

# Beside the framework what its ranks import anyway, the later parts of it that take long among them. Of hpctrain what
# both halves share: the ranks' half is imported by each rank, because faults are injected into it as it is imported.
_OF_RANKS = (
    *("numpy", "pydantic.json_schema", "yaml", "psutil", "safetensors.numpy", "xxhash", "mpi4py"),
    *("sklearn.datasets", "sklearn.model_selection", "tensorboard.summary.writer.event_file_writer"),
    *("hpctrain.common.recipes.load", "hpctrain.common.run.plan", "hpctrain.common.run.events"),
)
_WANTED = {
    "torch": (
        *("torch", "torch.distributed", "torch.utils.data", "torch._dynamo.backends.debugging"),
        *("torch.distributed.pipelining", *_OF_RANKS),
    ),
    "tensorflow": ("tensorflow", "keras", *_OF_RANKS),
}
_F_SETSIG = 10
_M_MMAP_THRESHOLD = -3
_PR_SET_PDEATHSIG = 1
_CLONE_NEWPID = 0x20000000
# Mounts, host name, shared memory of System V, network.
_CLONE_OTHERS = 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000
_READ_SECONDS = 30.0
# Above the numbers that a rank's own files can have.
_HIGH = 2000


def _end_with(parent: int) -> None:
    """End when the process that started this one ends, which may be before this is called."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def listen(directory: Path) -> None:
    """Start each server when somebody asks for it; never returns."""
    with selectors.DefaultSelector() as waiting:
        for framework in warm_start.SERVERS:
            for seed in (0, 1):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(warm_start.socket_path(str(directory), framework, seed))
                listener.listen(64)
                waiting.register(listener, selectors.EVENT_READ, (framework, seed))
        while True:
            for key, _ in waiting.select():
                _start_server(key.fileobj, *key.data)
                waiting.unregister(key.fileobj)


def _start_server(listener: Any, framework: str, seed: int) -> None:
    command = [sys.executable, __file__, str(os.getpid()), framework, str(listener.fileno())]
    environment = {
        # A threshold that was set cannot be taken back in a rank without one.
        **{name: os.environ[name] for name in os.environ.keys() - {warm_start.DIRECTORY, warm_start.MAPPING_THRESHOLD}},
        **warm_start.READ_AT_IMPORT,
        "LD_LIBRARY_PATH": warm_start.LIBRARIES,
        "PYTHONHASHSEED": str(seed + 1),
    }
    subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()], start_new_session=True)


@dataclass(frozen=True)
class _Request:
    """What a rank has to be, its open files, and the connection to the process that it stands for."""

    state: dict[str, Any]
    files: list[int]
    client: socket.socket


def serve(listener: socket.socket, own: dict[str, str]) -> _Request:
    """Fork a rank for each that asks and has its ``own`` surroundings; returns in the ranks alone."""
    ranks: dict[int, socket.socket] = {}
    home = warm_start.namespaces()
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    with selectors.DefaultSelector() as waiting, listener, woken, wake:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is woken:
                    woken.recv(64)
                    _report(ranks)
                    continue
                client, _ = listener.accept()
                try:
                    request = _receive(client)
                except (OSError, ValueError):
                    client.close()
                    continue
                is_away = request.state["namespaces"] != home
                rank = os.fork() if request.state["surroundings"] == own else None
                if rank == 0:
                    _leave(ranks)
                    if is_away:
                        _join_namespaces(client)
                    return request
                for number in request.files:
                    os.close(number)
                if rank is None:
                    client.close()
                    continue
                ranks[rank] = client
                if not is_away:
                    _send(client, rank)


def _receive(client: socket.socket) -> _Request:
    client.settimeout(_READ_SECONDS)
    header, files, _, _ = socket.recv_fds(client, warm_start.HEADER.size, 250)
    left, _ = warm_start.HEADER.unpack(header)
    text = bytearray()
    while len(text) < left:
        part = client.recv(left - len(text))
        if not part:
            raise ValueError("cut off")
        text += part
    return _Request(json.loads(text), files, client)


def _leave(ranks: dict[int, socket.socket]) -> None:
    """Let go, in a rank, of what the server needs for the others."""
    signal.set_wakeup_fd(-1)
    for other in ranks.values():
        other.close()


def _report(ranks: dict[int, socket.socket]) -> None:
    """Tell of each rank that has ended how it did."""
    for rank in list(ranks):
        ended, status = os.waitpid(rank, os.WNOHANG)
        if ended:
            with ranks.pop(rank) as client:
                _send(client, status)


def _send(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        client.sendall(warm_start.HEADER.pack(number, 0))


def _join_namespaces(client: socket.socket) -> None:
    """Go on as a new process where the client is, under the number that it has there; this one ends as that does."""
    there, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    process = os.pidfd_open(there)
    _set_namespaces(process, _CLONE_NEWPID)
    if rank := os.fork():
        client.close()
        os.closerange(0, _HIGH)
        warm_start.end_as(os.waitpid(rank, 0)[1])
    # This one alone: what stays outside would keep the network of a host that is gone.
    _set_namespaces(process, _CLONE_OTHERS)
    os.close(process)
    platform._uname_cache = None  # type: ignore[attr-defined]
    _send(client, os.getpid())


def _set_namespaces(process: int, kinds: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(process, kinds):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _take_over(request: _Request) -> socket.socket:
    """Become, in this process, what the client was; returns the connection to it, which has to stay."""
    state = request.state
    os.setsid()
    client = socket.socket(fileno=fcntl.fcntl(request.client, fcntl.F_DUPFD_CLOEXEC, _HIGH))
    request.client.close()
    # The end of the client, by SIGKILL too, ends this process.
    fcntl.fcntl(client, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, fcntl.F_SETFL, fcntl.fcntl(client, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if not client.recv(1, socket.MSG_DONTWAIT):
            os._exit(1)
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in request.files]
    os.closerange(0, _HIGH)
    for number, copy in zip(state["files"], copies, strict=True):
        os.dup2(copy, number, inheritable=True)
        os.close(copy)
    os.umask(state["umask"])
    os.chdir(state["directory"])
    os.sched_setaffinity(0, state["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, state["nice"])
    for number, limits in state["limits"]:
        resource.setrlimit(number, limits)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Python's own, which it does not install where a shell has started the server in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in state["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(state["environment"])
    # PyTorch's compiler has asked for the folder of the server's environment.
    tempfile.tempdir = None
    if threshold := os.environ.get(warm_start.MAPPING_THRESHOLD):
        # What glibc does with the variable when a process starts.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(threshold))
    sys.argv = state["arguments"]
    sys.orig_argv = state["command"]
    sys.path[:] = state["path"] if state["front"] is None else [state["front"], *state["path"]]
    importlib.invalidate_caches()
    _open_streams(unbuffered=state["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    # As in interpreters that start one after the other; Python's own generator does it by itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
        sys.modules["torch"].set_num_threads(int(os.environ.get(warm_start.THREADS) or len(state["cores"])))
    signal.pthread_sigmask(signal.SIG_SETMASK, state["blocked"])
    return client


def _open_streams(*, unbuffered: bool) -> None:
    """The standard streams as the interpreter makes them when it starts."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
            encoding="utf-8",
            errors=errors,
            line_buffering=number == 2 or raw.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(state: dict[str, Any]) -> None:
    """Run the rank's program as ``__main__``."""
    if "module" in state:
        # What `python -m` itself calls.
        runpy._run_module_as_main(state["module"])  # type: ignore[attr-defined]
    else:
        runpy.run_path(state["script"], run_name="__main__")


def _main(parent: str, where: str, descriptor: str = "") -> None:
    _end_with(int(parent))
    if not descriptor:
        listen(Path(where))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Frameworks set variables when they are imported.
    own = warm_start.surroundings()
    for wanted in _WANTED[where]:
        importlib.import_module(wanted)
    # What is there stays: neither collected nor, for that, copied in each rank.
    gc.freeze()
    request = serve(socket.socket(fileno=int(descriptor)), own)
    client = _take_over(request)
    _run(request.state)
    client.detach()


if __name__ == "__main__":
    _main(*sys.argv[1:])
