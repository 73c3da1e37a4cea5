"""Where an API server is and who we are there: what a kubeconfig, an account or a URL comes to."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gpunode.kubernetes.api import NoAccess

PROXY_HINT = (
    "let kubectl speak to the server: kubectl proxy --port=8001, then add --server http://127.0.0.1:8001"
)


_LONGEST = 300  # characters of an address in a message


@dataclass(frozen=True)
class Identity:
    """What proves who we are; all empty for nobody. Certificates and keys are paths, or PEM in base64."""

    token: str = field(default="", repr=False)
    token_file: str = ""
    cert_file: str = ""
    cert_data: str = field(default="", repr=False)
    key_file: str = ""
    key_data: str = field(default="", repr=False)
    username: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True)
class Connection:
    """One server and one identity.

    `source` says for people where that stands, `words` are the options that lead there again, for a command
    that undoes. `ca_file` is a path, `ca_data` PEM in base64; with neither the machine's own are trusted.
    `tls_name` is the name that the server's certificate is for, if that isn't its address. `headers` say on
    whose behalf requests are. `renew` gets a new identity where a program prints it. `node`: see `Cluster`.
    """

    server: str
    source: str
    words: tuple[str, ...] = ()
    namespace: str = "default"
    identity: Identity = Identity()
    ca_file: str = ""
    ca_data: str = ""
    insecure: bool = False
    proxy: str = ""
    tls_name: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    renew: Callable[[], Identity] | None = field(default=None, repr=False, compare=False)
    node: str = ""


def checked_server(url: Any, source: str) -> str:
    """The URL without a last slash. `NoAccess` for what is no http or https URL."""
    text = url if isinstance(url, str) else ""
    if "@" in text:  # it would stand in every message
        raise NoAccess(
            f"{source}: the API server's address {shown_url(text)[:_LONGEST]!r} has a name or password in it",
            hint="leave them out there: the kubeconfig's user has username and password",
        )
    try:
        parts = urlsplit(text)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not text.isprintable() or " " in text:
        told = repr(text[:_LONGEST]) if isinstance(url, str) else f"a {type(url).__name__}"
        raise NoAccess(
            f"{source}: {told} is no API server's address", hint="it is such as https://10.0.0.1:6443"
        )
    return text.rstrip("/")


def shown_url(url: str) -> str:
    """A URL for people: without the name and password that may stand in it."""
    return re.sub(r"//.*@", "//", url, flags=re.DOTALL)


def sound_token(token: str, source: str) -> str:
    """The token. `NoAccess`, which doesn't show it, for one that no header can hold."""
    if not all("!" <= character <= "~" for character in token):
        raise NoAccess(
            f"the token of {source} holds a blank, a line break or the like in its midst",
            hint="a token is one word: get it anew where it came from",
        )
    return token


def expiry(token: str) -> float:
    """When a JSON web token ends (seconds since the epoch, its claim `exp`); 0 where it doesn't say."""
    parts = token.split(".")
    if len(parts) != 3:
        return 0.0
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return 0.0
    found = claims.get("exp") if isinstance(claims, Mapping) else None
    return float(found) if isinstance(found, int | float) and 0 < found < 1e11 else 0.0
