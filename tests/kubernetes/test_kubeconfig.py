"""Connections and their requests: names, renewed certificates and tokens, impersonation, proxies."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fixtures.api_server import ADMIN, ApiServer, Fault, kubeconfig, make_client
from gpunode.host import Host
from gpunode.kubernetes.access import Access, connect, find, proxy_for
from gpunode.kubernetes.api import Forbidden, Invalid, NoAccess, Unauthorized, Unreachable
from gpunode.kubernetes.client import Cluster
from gpunode.kubernetes.kubeconfig import Certificate, client_certificate
from tests.cluster import ADVERTISE, Gpunode, capacity
from tests.kubernetes.test_access import edited
from tests.waiting import PATIENCE

Open = Callable[..., Cluster]


@pytest.fixture
def open_cluster(tmp_path: Path) -> Iterator[Open]:
    """A cluster from a kubeconfig's text."""
    with ExitStack() as stack:

        def call(text: str, **environ: str) -> Cluster:
            path = tmp_path / "config"
            path.write_text(text)
            made = connect(
                Host(Path("/"), {"PATH": os.environ["PATH"], **environ}), Access(kubeconfig=str(path))
            )
            return stack.enter_context(closing(made))

        yield call


def test_server_certificate_for_another_name_is_refused(api: ApiServer, open_cluster: Open) -> None:
    """As behind a tunnel or a load balancer's address."""
    text = edited(kubeconfig(api), cluster={"tls-server-name": "localhost"})
    assert open_cluster(text).get("Node", "gpu-1")
    other = open_cluster(edited(text, cluster={"tls-server-name": "other.example.com"}))
    with pytest.raises(Unreachable, match=r"not valid for 'other\.example\.com'") as caught:
        other.get("Node", "gpu-1")
    assert "tls-server-name" in caught.value.hint


def test_impersonated_user_is_sent_with_every_request(api: ApiServer, open_cluster: Open) -> None:
    text = edited(
        kubeconfig(api), user={"as": "reader", "as-groups": ["a", "b"], "as-user-extra": {"k": ["v"]}}
    )
    cluster = open_cluster(text)
    assert cluster.get("Node", "gpu-1")
    with pytest.raises(Forbidden, match='User "reader" cannot patch'):
        cluster.patch("Node", "gpu-1", [{"op": "add", "path": "/metadata/labels/x", "value": "1"}])
    assert {one.user for one in api.asked} == {"reader"}


def test_misspelled_impersonation_is_refused(api: ApiServer, open_cluster: Open) -> None:
    with pytest.raises(NoAccess, match="as-groups"):
        open_cluster(edited(kubeconfig(api), user={"as": "reader", "as-groups": 7}))


def test_unknown_fields_are_refused_by_the_server_and_not_dropped(api: ApiServer, open_cluster: Open) -> None:
    cluster = open_cluster(kubeconfig(api))
    with pytest.raises(Invalid, match=r'unknown field "spec\.taint"'):
        cluster.patch("Node", "gpu-1", [{"op": "add", "path": "/spec/taint", "value": "x"}])
    assert api.asked[-1].query["fieldValidation"] == ["Strict"]


# --- renewed credentials ----------------------------------------------------------------------------------


def printing(tmp_path: Path, **spec: Any) -> dict[str, Any]:
    """A program that prints the text of the file `token`, and records its input."""
    program = tmp_path / "signer"
    program.write_text(
        f'#!/bin/sh\nprintf %s "$KUBERNETES_EXEC_INFO" > {tmp_path}/info\n'
        f'printf \'{{"status": {{"token": "%s"}}}}\' "$(cat {tmp_path}/token)"\n'
    )
    program.chmod(0o755)
    return {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": str(program), **spec}


def test_expired_token_of_a_credential_program_is_renewed(
    api: ApiServer, open_cluster: Open, tmp_path: Path
) -> None:
    """EKS' are valid for a quarter of an hour; `labels --watch` runs for months."""
    (tmp_path / "token").write_text("first")
    api.users |= {"first": "admin", "second": "admin"}
    cluster = open_cluster(kubeconfig(api, exec=printing(tmp_path)))
    assert cluster.get("Node", "gpu-1")
    api.expired.add("first")
    with pytest.raises(Unauthorized):
        cluster.get("Node", "gpu-1")
    (tmp_path / "token").write_text("second")
    patched = cluster.patch("Node", "gpu-1", [{"op": "add", "path": "/metadata/labels/x", "value": "1"}])
    assert patched["metadata"]["labels"]["x"] == "1"
    assert "cluster" not in json.loads((tmp_path / "info").read_text())["spec"]


def test_cluster_info_is_passed_to_a_credential_program_on_request(
    api: ApiServer, open_cluster: Open, tmp_path: Path
) -> None:
    """As gke-gcloud-auth-plugin's entry requests it."""
    (tmp_path / "token").write_text(ADMIN)
    more = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}]
    text = kubeconfig(api, exec=printing(tmp_path, provideClusterInfo=True))
    assert open_cluster(edited(text, cluster={"extensions": more})).get("Node", "gpu-1")
    spec = json.loads((tmp_path / "info").read_text())["spec"]
    assert (spec["cluster"]["server"], spec["cluster"]["config"]) == (api.url, {"audience": "x"})
    assert base64.b64decode(spec["cluster"]["certificate-authority-data"]) == Path(api.ca).read_bytes()


def test_missing_credential_program_has_an_install_hint(
    api: ApiServer, open_cluster: Open, tmp_path: Path
) -> None:
    spec = printing(tmp_path, command="no-such-signer", installHint="install it\n  with gcloud")
    with pytest.raises(NoAccess) as caught:
        open_cluster(kubeconfig(api, exec=spec))
    assert caught.value.hint.startswith("install it with gcloud; or ")


def test_interactive_credential_program_is_not_started(
    api: ApiServer, open_cluster: Open, tmp_path: Path
) -> None:
    with pytest.raises(NoAccess, match="requires an interactive login"):
        open_cluster(kubeconfig(api, exec=printing(tmp_path, interactiveMode="Always")))
    assert not (tmp_path / "info").exists()


@pytest.fixture
def kubelets(api: ApiServer, certificates: Path, tmp_path: Path) -> tuple[Path, str]:
    """The kubelet's certificate, with its key in one file, and a kubeconfig with it."""
    pem = tmp_path / "kubelet-client-current.pem"
    make_client(certificates, pem, "system:node:gpu-1")
    api.users["system:node:gpu-1"] = "system:node:gpu-1"
    files = {"client-certificate": str(pem), "client-key": str(pem)}
    return pem, kubeconfig(api, **files)


def test_certificate_replaced_by_the_kubelet_is_read_again(
    api: ApiServer, open_cluster: Open, kubelets: tuple[Path, str], certificates: Path
) -> None:
    pem, text = kubelets
    cluster = open_cluster(text)
    assert cluster.node == "gpu-1"
    assert cluster.get("Node", "gpu-1")
    api.users = {"system:node:gpu-1 anew": "system:node:gpu-1"}
    with pytest.raises(Unauthorized):
        cluster.get("Node", "gpu-1")
    make_client(certificates, pem, "system:node:gpu-1 anew")
    assert cluster.get("Node", "gpu-1")


def test_kubelet_certificate_names_the_node(
    api: ApiServer, run: Gpunode, kubelets: tuple[Path, str], tmp_path: Path
) -> None:
    """The machine's own name is different."""
    path = tmp_path / "kubelet.conf"
    path.write_text(kubelets[1])
    done = run(*ADVERTISE, "--kubeconfig", str(path), NODE_NAME="")
    assert done.code == 0, done.err
    assert capacity(api) == "1"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("/metadata/labels/x.kubernetes.io~1a", "1", "not allowed to modify labels: x.kubernetes.io/a"),
        ("/metadata/labels/node-restriction.kubernetes.io~1a", "1", "not allowed to modify labels"),
        ("/spec/taints", [{"key": "a", "effect": "NoSchedule"}], "not allowed to modify taints"),
    ],
)
def test_node_restriction_error_is_explained(
    api: ApiServer, open_cluster: Open, kubelets: tuple[Path, str], path: str, value: Any, message: str
) -> None:
    before = api.node("gpu-1")
    with pytest.raises(Forbidden, match=message) as caught:
        open_cluster(kubelets[1]).patch("Node", "gpu-1", [{"op": "add", "path": path, "value": value}])
    assert "(NodeRestriction)" in caught.value.hint
    assert api.node("gpu-1") == before


def certificate(text: str, directory: Path) -> Certificate | None:
    """The client certificate of a kubeconfig."""
    (directory / "kubelet.conf").write_text(text)
    host = Host(Path("/"), {"PATH": os.environ["PATH"]})
    return client_certificate(host, find(host, Access(kubeconfig=str(directory / "kubelet.conf"))).user)


def test_expired_certificate_is_reported_as_such(
    api: ApiServer, open_cluster: Open, kubelets: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = open_cluster(kubelets[1])
    api.users.clear()
    own = certificate(kubelets[1], kubelets[0].parent)
    assert own is not None and own.node == "gpu-1"
    monkeypatch.setattr(Host, "now", lambda _: own.ends + 1)
    with pytest.raises(Unauthorized) as caught:
        cluster.get("Node", "gpu-1")
    assert "the certificate of system:node:gpu-1" in caught.value.hint
    assert "journalctl -u kubelet" in caught.value.hint


def test_end_date_of_a_certificate_is_read(kubelets: tuple[Path, str]) -> None:
    argv = ["openssl", "x509", "-in", str(kubelets[0]), "-noout", "-enddate", "-dateopt", "iso_8601"]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    found = certificate(kubelets[1], kubelets[0].parent)
    assert found is not None
    shown = datetime.fromtimestamp(found.ends, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
    assert printed.strip() == f"notAfter={shown}"


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----", "x"])
def test_invalid_certificate_is_not_read(kubelets: tuple[Path, str], text: str) -> None:
    kubelets[0].write_text(text)
    assert certificate(kubelets[1], kubelets[0].parent) is None


def test_comma_in_a_common_name_is_not_a_second_field(kubelets: tuple[Path, str], certificates: Path) -> None:
    make_client(certificates, kubelets[0], "x,CN=system:node:other")
    found = certificate(kubelets[1], kubelets[0].parent)
    assert found is not None and found.node == ""


def test_request_without_credentials_is_reported_as_such(api: ApiServer, open_cluster: Open) -> None:
    cluster = open_cluster(edited(kubeconfig(api), context={"user": ""}))
    with pytest.raises(Forbidden) as caught:
        cluster.get("Node", "gpu-1")
    assert "sends no credentials" in caught.value.hint


# --- proxies ----------------------------------------------------------------------------------------------

PROXY_URL = "http://proxy:3128"


@pytest.mark.parametrize(
    ("server", "environ", "proxy"),
    [
        ("https://10.0.0.1:6443", {}, ""),
        ("https://10.0.0.1:6443", {"HTTPS_PROXY": "proxy:3128"}, PROXY_URL),
        ("https://10.0.0.1:6443", {"https_proxy": PROXY_URL, "HTTP_PROXY": "x"}, PROXY_URL),
        ("https://10.0.0.1:6443", {"ALL_PROXY": "socks5://x"}, ""),
        ("https://10.0.0.1:6443", {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": "x, 10.0.0.0/8"}, ""),
        ("https://10.0.0.1:6443", {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": "10.0.0.1:6443"}, ""),
        (
            "https://10.0.0.1:6443",
            {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": "10.0.0.1:443,11.0.0.0/8"},
            PROXY_URL,
        ),
        ("https://10.0.0.1:6443", {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": "*"}, ""),
        ("https://[fd00::1]:6443", {"HTTPS_PROXY": PROXY_URL, "no_proxy": "fd00::/8"}, ""),
        ("https://[fd00::1]:6443", {"HTTPS_PROXY": PROXY_URL, "no_proxy": "[fd00::1]:6443"}, ""),
        ("https://api.example.com", {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": "example.com"}, ""),
        ("https://api.example.com", {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": "*.example.com:443"}, ""),
        ("https://example.com", {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": ".example.com"}, PROXY_URL),
        ("https://notexample.com", {"HTTPS_PROXY": PROXY_URL, "NO_PROXY": "example.com"}, PROXY_URL),
        ("https://127.0.0.2:6443", {"HTTPS_PROXY": PROXY_URL}, ""),
        ("http://localhost:8001", {"HTTP_PROXY": PROXY_URL}, ""),
    ],
)
def test_proxy_is_chosen_as_in_kubectl(server: str, environ: dict[str, str], proxy: str) -> None:
    assert proxy_for(server, environ) == proxy


def test_proxy_that_needs_another_library_is_refused_with_a_hint(api: ApiServer, open_cluster: Open) -> None:
    with pytest.raises(NoAccess, match=r"the proxy socks5://127.0.0.1:1 can't be used") as caught:
        open_cluster(edited(kubeconfig(api), cluster={"proxy-url": "socks5://127.0.0.1:1"}))
    assert "kubectl proxy" in caught.value.hint


def test_oidc_token_is_used_until_it_expires(api: ApiServer, open_cluster: Open) -> None:
    def config(**more: str) -> str:
        provider = {"name": "oidc", "config": more}
        return edited(kubeconfig(api), user={"token": None, "auth-provider": provider})

    assert open_cluster(config(**{"id-token": ADMIN})).get("Node", "gpu-1")
    ended = base64.urlsafe_b64encode(b'{"exp": 1700000000}').decode().rstrip("=")
    for text in (config(), config(**{"id-token": f"e30.{ended}.x"})):
        with pytest.raises(NoAccess, match="has expired") as caught:
            open_cluster(text)
        assert "kubectl get nodes" in caught.value.hint


# --- a node of another name -------------------------------------------------------------------------------


def test_node_with_another_name_is_suggested_by_its_machine_id(api: ApiServer, run: Gpunode) -> None:
    own = Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").is_file() else ""
    if not own:
        pytest.skip("this machine has no machine-id")
    api.node("gpu-1")["status"]["nodeInfo"] = {"machineID": own}
    done = run(*ADVERTISE, NODE_NAME="nowhere")
    assert (done.code, "this machine is the node gpu-1: add --node gpu-1" in done.err) == (3, True)
    api.faults.append(Fault("GET", "/nodes", "status", 99, 403, "Forbidden", after=1))
    assert "kubectl get nodes" in run(*ADVERTISE, NODE_NAME="nowhere").err


class Tunnel(BaseHTTPRequestHandler):
    """A proxy that carries CONNECT to any server, for one name and password."""

    def do_CONNECT(self) -> None:
        if self.headers.get("Proxy-Authorization") != f"Basic {base64.b64encode(b'me:secret').decode()}":
            self.send_error(407)
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as there:
            self.send_response(200)
            self.end_headers()
            back = Thread(target=carry, args=(there, self.connection), daemon=True)
            back.start()
            carry(self.connection, there)
            back.join(PATIENCE)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def carry(source: socket.socket, to: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture
def tunnel() -> Iterator[str]:
    """A proxy's host and port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Tunnel) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(PATIENCE)


def test_proxy_with_a_password(api: ApiServer, open_cluster: Open, tunnel: str) -> None:
    cluster = open_cluster(edited(kubeconfig(api), cluster={"proxy-url": f"http://me:secret@{tunnel}"}))
    assert cluster.get("Node", "gpu-1")["metadata"]["name"] == "gpu-1"
    cluster.close()


@pytest.mark.parametrize(("user", "message"), [("me:wrong@", "407"), ("", "407")])
def test_proxy_that_refuses_is_named(
    api: ApiServer, open_cluster: Open, tunnel: str, user: str, message: str
) -> None:
    cluster = open_cluster(edited(kubeconfig(api), cluster={"proxy-url": f"http://{user}{tunnel}"}))
    with pytest.raises(Unreachable, match=message) as caught:
        cluster.get("Node", "gpu-1")
    assert f"through the proxy http://{tunnel}: 407" in caught.value.message
    assert "HTTPS_PROXY" in caught.value.hint
    assert not caught.value.sent
    assert api.asked == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
def test_root_runs_no_credential_program_of_another_user(
    api: ApiServer, open_cluster: Open, tmp_path: Path
) -> None:
    spec = printing(tmp_path)
    os.chown(spec["command"], 65534, 65534)
    with pytest.raises(NoAccess, match=r"was not run: .* belongs to user 65534"):
        open_cluster(kubeconfig(api, exec=spec))
    assert not (tmp_path / "info").exists()


@pytest.mark.parametrize(
    ("content", "problem", "hint"),
    [
        (b"\xff\xfe\x00\x01", "is not a kubeconfig: not text", ""),
        (b"contexts: \x00", "is not a kubeconfig: not text", ""),
        (
            b"contexts: [a, b\nusers: []\n",
            "can't be parsed: line 2: not YAML: while parsing a flow sequence"
            " did not find expected ',' or ']'",
            "",
        ),
        (b"", "has no contexts", "name another file: --kubeconfig PATH"),
    ],
)
def test_file_that_is_no_kubeconfig_is_named_with_the_whole_reason(
    run: Gpunode, tmp_path: Path, content: bytes, problem: str, hint: str
) -> None:
    path = tmp_path / "my config"
    path.write_bytes(content)
    ran = run(*ADVERTISE, "--kubeconfig", str(path))
    shown = hint or f"see: kubectl config view --kubeconfig '{path}'"
    assert ran.code != 0 and ran.err == f"error: {path} {problem}\nhint: {shown}\n"
