"""The program that a kubeconfig names to get a token or a certificate from: EKS', GKE's, OIDC's and others.

Protocol: client.authentication.k8s.io/v1 and v1beta1, an ExecCredential on its standard output. It is run
without a shell and with nobody to ask: who must sign in by hand has kubectl do it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from gpunode.host import Host
from gpunode.host.process import COMMAND_NOT_FOUND
from gpunode.kubernetes.api import NoAccess
from gpunode.kubernetes.connection import PROXY_HINT, Identity

_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_SECONDS = 60.0


def identity_from_program(
    host: Host, spec: Any, file: str, cluster: Callable[[], Mapping[str, Any]] = dict
) -> Identity:
    """Run it; `cluster` is what it is told of that if it wants to be (provideClusterInfo).

    `NoAccess` says what it said, or why it can't be run; what it prints is never shown.
    """
    argv, env, version = _command(spec, file)
    told: dict[str, Any] = {"interactive": False}
    if spec.get("provideClusterInfo") is True:
        told["cluster"] = cluster()
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": told}
    quiet = replace(host, trace=None)  # its arguments may hold a secret
    if host.trace is not None:
        host.trace(f"{argv[0]} ..." if argv[1:] else argv[0])
    done = quiet.run(argv, timeout=_SECONDS, env={**env, "KUBERNETES_EXEC_INFO": json.dumps(info)})
    if done.code == COMMAND_NOT_FOUND and host.which(argv[0]) is None:
        hint = " ".join(str(spec.get("installHint") or "").split())
        raise NoAccess(
            f"{file} gets its token from {argv[0]}, which is not there",
            hint=f"{hint[:300]}; or {PROXY_HINT}" if hint else PROXY_HINT,
        )
    if done.timed_out or done.code != 0:
        why = f"took longer than {_SECONDS:.0f} s" if done.timed_out else f"ended with {done.code}"
        said = " ".join(done.stderr.split())[-300:]
        raise NoAccess(f"{argv[0]}, which {file} gets its token from, {why}: {said}", hint=PROXY_HINT)
    try:
        status = json.loads(done.stdout)["status"]
        token = _string(status, "token")
        cert, key = _string(status, "clientCertificateData"), _string(status, "clientKeyData")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NoAccess(f"{argv[0]} printed no ExecCredential ({file})", hint=PROXY_HINT) from error
    if not token and not (cert and key):
        raise NoAccess(f"{argv[0]} printed neither a token nor a certificate ({file})", hint=PROXY_HINT)
    encoded = (base64.b64encode(text.encode()).decode() if text else "" for text in (cert, key))
    return Identity(token, "", "", next(encoded), "", next(encoded))


def _command(spec: Any, file: str) -> tuple[list[str], dict[str, str], str]:
    wrong = NoAccess(f"{file}: exec must have apiVersion, command, args and env", hint=PROXY_HINT)
    if not isinstance(spec, Mapping) or not isinstance(spec.get("command"), str) or not spec["command"]:
        raise wrong
    if spec.get("interactiveMode") == "Always":
        raise NoAccess(f"{file}: {spec['command']} wants somebody to sign in by hand", hint=PROXY_HINT)
    version = spec.get("apiVersion")
    if version not in _VERSIONS:
        raise NoAccess(
            f"{file}: exec's apiVersion {repr(version)[:100]} isn't known; known are {', '.join(_VERSIONS)}",
            hint=PROXY_HINT,
        )
    args, env = spec.get("args") or [], spec.get("env") or []
    if not isinstance(args, list) or not all(isinstance(one, str) for one in args):
        raise wrong
    try:
        named = {str(one["name"]): str(one["value"]) for one in env}
        "".join((spec["command"], *args, *named, *named.values())).encode()  # a lone surrogate has no bytes
    except (TypeError, KeyError, UnicodeEncodeError) as error:
        raise wrong from error
    if any("\0" in one for one in (spec["command"], *args, *named, *named.values())) or any(
        not name or "=" in name for name in named
    ):
        raise wrong
    command = spec["command"]
    if "/" in command:
        command = str(PurePosixPath(file).parent / command)
    return [command, *args], named, version


def _string(status: Mapping[str, Any], key: str) -> str:
    found = status.get(key) or ""
    if not isinstance(found, str):
        raise TypeError(key)
    return found
