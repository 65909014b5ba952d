"""The audit of packages in ``make lint``, with an index and a pip-audit of the test's own."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.golden import check_text

_AUDIT = Path(__file__).parents[2] / ".ci" / "audit.py"


class _Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"vulnerabilities": []}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _audit(folder: Path, index: str, script: str, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    program = folder / "pip-audit"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    command = [sys.executable, str(_AUDIT), f"--index={index}", f"--program={program}", f"--seconds={seconds}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _says(*packages: dict[str, object]) -> str:
    return f"cat <<'END'\n{json.dumps({'dependencies': packages})}\nEND\nexit 1"


def test_a_vulnerability_fails(tmp_path: Path, index: str) -> None:
    bad = {"name": "torch", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2.0"]}]}
    done = _audit(tmp_path, index, _says({"name": "numpy", "version": "2", "vulns": []}, bad))
    assert done.returncode == 1, done.stderr
    check_text("audit-vulnerable", done.stdout)


def test_no_vulnerability_passes_and_what_is_unknown_is_said(tmp_path: Path, index: str) -> None:
    packages = {"name": "numpy", "version": "2", "vulns": []}, {"name": "own", "skip_reason": "not on PyPI"}
    done = _audit(tmp_path, index, _says(*packages))
    assert done.returncode == 0, done.stderr
    check_text("audit-unknown", done.stdout)


def test_an_audit_that_takes_too_long_is_left_out_in_one_line(tmp_path: Path, index: str) -> None:
    done = _audit(tmp_path, index, "exec sleep 60", 0.5)
    assert done.returncode == 0, done.stderr
    assert " out: " in done.stdout and " 0.5 s" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "script", ["echo broken >&2; exit 1", "echo '[]'; echo broken >&2; exit 1", "echo '{}'; echo broken >&2"]
)
def test_an_audit_that_fails_though_the_index_answers_is_a_failure(tmp_path: Path, index: str, script: str) -> None:
    done = _audit(tmp_path, index, script)
    assert (done.returncode, done.stdout) == (1, "")
    assert "exit status" in done.stderr and done.stderr.endswith(": broken\n")
    assert done.stderr.count("\n") == 1


def test_a_program_that_is_missing_is_a_failure(index: str) -> None:
    command = [sys.executable, str(_AUDIT), f"--index={index}", "--program=/nowhere/pip-audit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "/nowhere/pip-audit: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_network_it_says_so(tmp_path: Path) -> None:
    # A port that nobody listens at: it was free a moment ago.
    with http.server.HTTPServer(("127.0.0.1", 0), _Index) as server:
        index = f"http://127.0.0.1:{server.server_port}"
    done = _audit(tmp_path, index, "exit 2")
    assert done.returncode == 0, done.stderr
    assert f" out: {index}/pypi/pip/" in done.stdout
