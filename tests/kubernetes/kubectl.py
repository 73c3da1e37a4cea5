"""kubectl as a client of manifests, without a cluster: a test server lists the existing kinds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

_KINDS = {
    "v1": {"Pod": True, "Node": False, "Namespace": False, "ConfigMap": True, "ServiceAccount": True},
    "apps/v1": {"DaemonSet": True},
    "node.k8s.io/v1": {"RuntimeClass": False},
    "rbac.authorization.k8s.io/v1": {
        **{"ClusterRole": False, "ClusterRoleBinding": False},
        **{"Role": True, "RoleBinding": True},
    },
}


class Discovery(BaseHTTPRequestHandler):
    """/api, /apis and everything below, as any API server has it; all other paths are unknown."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        document = _answer(path)
        body = json.dumps(
            document or {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
        )
        self.send_response(200 if document else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def _answer(path: str) -> dict[str, Any] | None:
    groups = [name for name in _KINDS if "/" in name]
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        versions = [{"groupVersion": name, "version": "v1"} for name in groups]
        listed = [
            {"name": name.partition("/")[0], "versions": [one], "preferredVersion": one}
            for name, one in zip(groups, versions, strict=True)
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    name = path.removeprefix("/apis/").removeprefix("/api/")
    if name not in _KINDS:
        return None
    resources = [
        {
            "name": f"{kind.lower()}{'es' if kind.endswith('s') else 's'}",
            "singularName": kind.lower(),
            "namespaced": namespaced,
            "kind": kind,
            "verbs": ["create", "get", "list", "patch"],
        }
        for kind, namespaced in _KINDS[name].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}


@contextmanager
def discovery() -> Iterator[str]:
    """The server's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Discovery)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def kubectl(*argv: str, stdin: str, home: str, server: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with an empty configuration; its test is skipped if it isn't installed."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl isn't installed (scripts/install-engines; not every archive has it)")
    where = ("--server", server) if server else ()
    return subprocess.run(
        [program, *where, *argv],
        input=stdin,
        env={"PATH": os.environ["PATH"], "HOME": home, "KUBECONFIG": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
