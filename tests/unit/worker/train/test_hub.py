"""Whether Hugging Face's libraries are told that their Hub is not reached: real servers, and their own package."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.worker.train import hub

_NAMES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """What Hugging Face's libraries are to ask, which does not listen yet."""
    for name in _NAMES:
        # Set first, so that what a test sets is taken back too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    return server


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.plan.touch()
    return directory


def test_the_hub_is_asked_where_the_user_does_not_say(directory, server, monkeypatch):
    with server:
        monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
        hub._stay_offline(directory, None)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE")
        assert "HF_HUB_OFFLINE" not in os.environ
        hub._stay_offline(directory, None)
        assert os.environ.pop("HF_HUB_OFFLINE") == "1"
        # Through a proxy it is the proxy that answers.
        monkeypatch.setenv("http_proxy", os.environ["HF_ENDPOINT"].removeprefix("http://"))
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
        server.listen()
        hub._stay_offline(directory, None)
        assert "HF_HUB_OFFLINE" not in os.environ


def test_all_ranks_of_a_host_follow_the_first_one_in_an_attempt(directory, server, monkeypatch, tmp_path):
    """Also where the Hub answers some of them alone; the next attempt asks again."""
    answers = iter([False, True, True, False])
    monkeypatch.setattr(hub, "_answers", lambda *_: next(answers))
    for attempt, offline in ((1, "1"), (1, "1"), (2, None), (2, None)):
        os.utime(directory.plan, (attempt, attempt))
        hub._stay_offline(directory, tmp_path)
        assert os.environ.pop("HF_HUB_OFFLINE", None) == offline
    # Nothing is left of the first attempt.
    assert len([*tmp_path.glob("hub-*")]) == 1


def test_a_name_that_is_looked_up_for_long_is_not_waited_for(directory, server, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(60) and [])
    monkeypatch.setattr(hub, "_SECONDS", 0.1)
    begin = time.monotonic()
    hub._stay_offline(directory, None)
    ended.set()
    assert os.environ["HF_HUB_OFFLINE"] == "1" and time.monotonic() - begin < 5


def test_hugging_faces_own_package_reads_it(server, tmp_path):
    """Set after the package is imported, and before it reads the variable."""
    pytest.importorskip("huggingface_hub")
    text = (
        "from pathlib import Path; from hpctrain.common.run.directory import RunDirectory; "
        "from hpctrain.worker.train.hub import ask_for_the_hub; "
        "ask_for_the_hub(RunDirectory(Path('.')), None); "
        "from huggingface_hub import hf_hub_download, constants; print(constants.HF_HUB_OFFLINE)"
    )
    with server:
        done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"
