"""Sets variables that other libraries read in a rank, where the user has not set them: they follow from its run.

Each rank does so itself: some differ by rank and host, and no launcher has to pass them on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.stderr import tell
from hpctrain.worker.comm.after_import import change_after_import
from hpctrain.worker.train.tracked_runs import keep_tracked_runs

CACHE = "TORCHINDUCTOR_CACHE_DIR"
# How PyTorch calls the beginning of a dump's path, the second until 2.8.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_HUB_SECONDS = 4.0
_PORTS = {"http": 80, "https": 443}


def keep_dumps(directory: RunDirectory) -> None:
    """Have PyTorch write what it records of NCCL's collectives into the run, where its watchdog ends one that hangs.

    It records the last 2,000 unless ``TORCH_FR_BUFFER_SIZE`` says otherwise.
    """
    if not any(name in os.environ for name in _DUMPS):
        os.environ |= dict.fromkeys(_DUMPS, str(directory.flight_recorder.absolute()))


def set_variables(directory: RunDirectory, rank: int) -> None:
    """Set the variables of a rank's process before its script begins."""
    # The script may change its working directory.
    directory = RunDirectory(directory.path.absolute())
    variables = {}
    try:
        folder = code_folder()
        variables = {CACHE: str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    except HpctrainError as error:
        tell(f"hpctrain: warning: {error}")
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    keep_tracked_runs(directory, rank)
    change_after_import({"huggingface_hub": lambda _: _stay_offline(directory)})


def _stay_offline(directory: RunDirectory) -> None:
    """Have the libraries of Hugging Face take what is in their caches where their Hub is not reached.

    They ask it for each file, and wait for it and repeat that for minutes where packets are dropped. Called once the
    package is imported, which reads the variable later.
    """
    if any(name in os.environ for name in _OFFLINE):
        return
    try:
        host, port = _first_asked()
    except ValueError:  # a wrong address, of which the library itself says more
        return
    if host and not _host_is_answered(directory, host, port):
        os.environ[_OFFLINE[0]] = "1"
        tell(
            f"hpctrain: {host} is not reached from {socket.gethostname()} within {_HUB_SECONDS:g} s: "
            f"{_OFFLINE[0]}=1 has Hugging Face's libraries take what is in their caches; export {_OFFLINE[0]}=0 has "
            "them ask"
        )


def _first_asked() -> tuple[str | None, int]:
    """The host and the port that are connected to for the Hub: those of a proxy, where there is one.

    Raises:
        ValueError: an address is wrong.
    """
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    asked = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy and not proxy_bypass(hub.netloc) else hub
    return asked.hostname, asked.port or _PORTS.get(asked.scheme, 443)


def _host_is_answered(directory: RunDirectory, host: str, port: int) -> bool:
    """Whether the Hub answers this host: as the first of its ranks to know has seen it in this attempt.

    Ranks that saw different things would read different files, or wait for each other.
    """
    answers = _answers(host, port)
    # A link is made whole or not at all, and only once. Each attempt replaces the plan.
    with contextlib.suppress(OSError, HpctrainError):
        folder, name = code_folder(), f"hub-{zlib.crc32(bytes(directory.path)):08x}-"
        first = folder / f"{name}{directory.plan.stat().st_mtime_ns}"
        try:
            first.symlink_to("answers" if answers else "silent")
        except FileExistsError:
            return first.readlink().name == "answers"
        for old in {*folder.glob(f"{name}*")} - {first}:
            old.unlink(missing_ok=True)
    return answers


def _answers(host: str, port: int) -> bool:
    """Whether any of a host's addresses can be connected to within the limit."""
    reached, done = threading.Event(), threading.Event()

    def connect(address: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError), socket.create_connection(address[:2], _HUB_SECONDS):
            reached.set()
            done.set()

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            addresses = {address for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
            # At a time: where packets of one family are dropped, the others are not to wait for it.
            asking = [threading.Thread(target=connect, args=(address,), daemon=True) for address in addresses]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
        done.set()

    # In a thread, because looking up a name has no limit.
    threading.Thread(target=ask, name="hpctrain-hub", daemon=True).start()
    done.wait(_HUB_SECONDS)
    return reached.is_set()


def code_folder() -> Path:
    """The user's own folder for compiled code in the node's temporary storage, where anybody can make folders.

    Raises:
        HpctrainError: it cannot be made, is another user's, or can be written by others, whose code ranks would run.
    """
    elsewhere = f"{CACHE}=DIR chooses another"
    # Some sites set SLURM_TMPDIR in jobs, and not TMPDIR.
    folder = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()) / f"hpctrain-compiled-{os.getuid()}"
    try:
        make_folder(folder)
        status = folder.lstat()
    except OSError as error:
        raise disk_error(error, folder, elsewhere) from error
    foreign = stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid()
    if foreign or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HpctrainError(
            "HT-cache-not-safe",
            "{folder}, whose files ranks run, is another user's, or others can write into it",
            f"rm -r {folder}, or {elsewhere}",
            folder=folder,
        )
    return folder.absolute()
