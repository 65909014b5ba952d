"""Recognises environment variables that hold secrets, by their names and by their values."""

from __future__ import annotations

import re

_NAMES = re.compile(
    r"""
    .*(SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|CONNECTION_?STRING).*
    # After these a variable's name ends, or has a number: a path or a limit of one is no secret.
    | (.*TOKENS? | .*API_?KEYS? | (.*_)?(KEYS?|PASS|AUTH|DSN) | .+_(PWD|PAT)) (_ID|_?V?\d+)*
    # Addresses that have a password in them as a rule.
    | (.*_)?(DATABASE|DB|MONGO(DB)?|MYSQL|POSTGRES(QL)?|REDIS|BROKER)_UR[IL]
    """,
    re.IGNORECASE | re.VERBOSE,
)


# A user of ssh is no secret.
_CREDENTIALS = re.compile(r"(?<!\bssh)://[^/\s@]+@")


def has_credentials(address: str) -> bool:
    """Whether it is an address with a password or a token, as ``https://user:password@host``."""
    return _CREDENTIALS.search(address) is not None


def is_secret(name: str) -> bool:
    """Whether a variable's name suggests a secret, as ``WANDB_API_KEY`` does; such values are written nowhere."""
    return _NAMES.fullmatch(name) is not None
