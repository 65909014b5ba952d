"""Environment variables whose values are nobody else's business, by their names."""

from __future__ import annotations

import re

_NAMES = re.compile(
    r"AWS_.*|.*(SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL).*|(.*_)?(TOKENS?|API_?KEYS?|KEYS?|AUTH)(_ID)?",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable's name is one that secrets have, such as ``WANDB_API_KEY``; its value is written nowhere."""
    return _NAMES.fullmatch(name) is not None
