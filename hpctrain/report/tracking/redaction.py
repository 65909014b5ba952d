"""Removes secrets from messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from hpctrain.common.secrets import is_secret

_HIDDEN = "…"
# Shorter values, of variables and of parts of an address, occur in too many words to be removed from messages.
_SHORTEST_VALUE, _SHORTEST_PART = 6, 3
# A folder, a file of a database, or databricks, without anything that could be a secret.
_STORE = re.compile(r"(?:(?:file|sqlite):/{1,4})?[\w./-]+")


def secrets(environment: Mapping[str, str], address: str | None) -> tuple[str, ...]:
    """The texts to remove: the values of secret variables, and the parts of an address that may hold a token."""
    found = {value for name, value in environment.items() if is_secret(name) and len(value) >= _SHORTEST_VALUE}
    if address:
        # An address without secrets is shown whole.
        found |= {address} - {server(address)}
        found |= {part for part in _parts(address) if len(part) >= _SHORTEST_PART}
    found |= {written for text in found for written in (quote(text, safe=""), unquote(text))}
    return tuple(sorted(found, key=len, reverse=True))


def without(text: str, hidden: tuple[str, ...]) -> str:
    """The text with an ellipsis in place of each of these."""
    for secret in hidden:
        text = text.replace(secret, _HIDDEN)
    return text


def server(address: str) -> str:
    """The scheme, host and port of an address, or a store on this machine, which may be shown."""
    try:
        found = urlsplit(address)
        host, port = found.hostname, found.port
    except ValueError:
        return "the server"
    if not host:
        return address if _STORE.fullmatch(address) else "the server"
    return f"{found.scheme}://{host}{f':{port}' if port else ''}"


def _parts(address: str) -> Iterator[str]:
    try:
        found = urlsplit(address)
    except ValueError:
        return
    user, _, _ = found.netloc.rpartition("@")
    # A user name without a password is a token.
    secret = found.password or found.username
    values = [value for _, value in parse_qsl(found.query)]
    yield from (part for part in (user, secret, found.query, found.fragment, *values) if part)
