"""Which proxy leads to an API server, as kubectl finds it in the environment.

Rules: Go's golang.org/x/net/http/httpproxy. Unlike other clients it reads no ALL_PROXY, takes address ranges
in NO_PROXY, and never asks a proxy for this machine itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def proxy_for(server: str, environ: Mapping[str, str]) -> str:
    """The proxy's URL for a server's; empty for none."""
    parts = urlsplit(server)
    host = (parts.hostname or "").lower()
    if _is_loopback(host) or _excepted(host, parts.port or _PORTS[parts.scheme], environ):
        return ""
    found = _of(environ, f"{parts.scheme}_proxy")
    return found if not found or "://" in found else f"http://{found}"


def _of(environ: Mapping[str, str], name: str) -> str:
    return (environ.get(name.upper()) or environ.get(name) or "").strip()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _excepted(host: str, port: int, environ: Mapping[str, str]) -> bool:
    """Whether NO_PROXY names it: ``*``, an address, a range, a domain; each maybe with a port."""
    return any(_matches(one.strip().lower(), host, port) for one in _of(environ, "no_proxy").split(","))


def _matches(entry: str, host: str, port: int) -> bool:
    if entry in ("", "*"):
        return entry == "*"
    try:
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    except (ValueError, TypeError):
        pass  # one of the two is a name, or has a port
    name, colon, wanted = entry.rpartition(":")
    if colon and wanted.isdecimal() and (":" not in name or name.endswith("]")):
        return int(wanted) == port and _matches(name, host, port)
    name = entry.removeprefix("*")
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")
