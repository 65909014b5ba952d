"""Tries a ``tokenizer.json`` in a process of its own, which limits end.

The library trusts such a file: where a size in it is wrong, its Rust asks for any memory, and ends the process that
cannot give it; rules that replace a letter by many, several times over, do the same with the first text.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_SECONDS = 60
_BYTES = 1 << 31
# Tells a fault from what a sitecustomize prints.
_MARK = "hpctrain: fault of the tokenizer: "
# What cannot be encoded may not be in the texts either, for which the library has plain exceptions.
_PROGRAM = """
import resource, sys
seconds, size = map(int, sys.argv[1:3])
for what, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, size), (resource.RLIMIT_CORE, 0)):
    # The hard limit stays: a process that exceeds that one is killed, as one that the system has no memory for.
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
try:
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.get_vocab(with_added_tokens=True)
    text = "".join(map(chr, range(1, 0x250))) + " the quick brown fox 0123 \\u4e2d\\u6587 \\U0001f600 " + "a" * 64 + "!"
    try:
        tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except Exception:
        pass
except BaseException as error:
    text = (str(error) or type(error).__name__)[:1000].encode("ascii", "backslashreplace").decode()
    print("\\n" + sys.argv[3] + text)
"""


def probe_fault(content: bytes) -> str | None:
    """Why the library cannot use a ``tokenizer.json``, or must not; None if it can."""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(_SECONDS), str(_BYTES), _MARK]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    try:
        done = subprocess.run(
            command, input=content, capture_output=True, env=environment, timeout=10 * _SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"reading it, and encoding a line with it, takes more than {10 * _SECONDS} s"
    if done.returncode == -signal.SIGXCPU:
        return f"reading it, and encoding a line with it, takes more than {_SECONDS} s"
    if done.returncode == -signal.SIGKILL:
        return (
            "the system killed the process that read it and encoded a line with it, which took more memory or time "
            "than this machine or job gives"
        )
    if done.returncode == -signal.SIGABRT:
        return f"reading it, and encoding a line with it, takes more than {_BYTES / 1e9:.1f} GB"
    if done.returncode:
        return f"reading it ends the process with status {done.returncode}"
    _, marked, fault = done.stdout.decode(errors="replace").rpartition(_MARK)
    return fault.strip() if marked else None
