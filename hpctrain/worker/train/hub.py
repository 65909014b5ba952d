"""Has Hugging Face's libraries take what is in their caches where a rank's host does not reach their Hub.

They ask it for each file, and wait for it and repeat that for minutes where packets are dropped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.stderr import tell
from hpctrain.worker.comm.after_import import change_after_import

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_SECONDS = 4.0
_PORTS = {"http": 80, "https": 443}


def ask_for_the_hub(directory: RunDirectory, folder: Path | None) -> None:
    """Look for the Hub when a script has imported ``huggingface_hub``, which reads the variable later.

    Args:
        folder: the user's own one on the host's temporary storage, where its ranks share the answer.
    """
    attempt = RunDirectory(directory.path.absolute())  # The script may change its working directory.
    change_after_import({"huggingface_hub": lambda _: _stay_offline(attempt, folder)})


def _stay_offline(directory: RunDirectory, folder: Path | None) -> None:
    if any(name in os.environ for name in _OFFLINE):
        return
    try:
        host, port = _first_asked()
    except ValueError:  # a wrong address, of which the library itself says more
        return
    if host and not _first_answer(directory, folder, answers=_answers(host, port)):
        os.environ[_OFFLINE[0]] = "1"
        tell(
            f"hpctrain: {host} is not reached from {socket.gethostname()} within {_SECONDS:g} s: {_OFFLINE[0]}=1 has "
            f"Hugging Face's libraries take what is in their caches; export {_OFFLINE[0]}=0 has them ask"
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


def _first_answer(directory: RunDirectory, folder: Path | None, *, answers: bool) -> bool:
    """What the first rank of this host to know has seen in this attempt.

    Ranks that saw different things would read different files, or wait for each other.
    """
    if folder is None:
        return answers
    name = f"hub-{zlib.crc32(bytes(directory.path)):08x}-"
    # A link is made whole or not at all, and only once. Each attempt replaces the plan.
    with contextlib.suppress(OSError):
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
        with contextlib.suppress(OSError), socket.create_connection(address[:2], _SECONDS):
            reached.set()
            done.set()

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            addresses = {address for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
            # Beside each other: where packets of one family are dropped, the others are not to wait for it.
            asking = [threading.Thread(target=connect, args=(address,), daemon=True) for address in addresses]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
        done.set()

    # In a thread for which nothing waits, not even the end of the process: looking up a name has no limit.
    threading.Thread(target=ask, name="hpctrain-hub", daemon=True).start()
    done.wait(_SECONDS)
    return reached.is_set()
