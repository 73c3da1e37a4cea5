"""Every connection to an API server: kubeconfigs of users, a pod's account, kubectl proxy."""

from __future__ import annotations

import base64
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.api_server import ADMIN, ApiServer, Fault, Listening, kubeconfig
from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.kubernetes.access import ACCOUNT, Access, find, node_name
from tests.cluster import ADVERTISE, Gpunode, capacity
from tests.waiting import PATIENCE


def edited(text: str, **parts: Any) -> str:
    """A kubeconfig with `cluster`, `user` or `context` entries changed, or a key of the top."""
    tree = json.loads(text)
    for key, value in parts.items():
        if key in ("cluster", "user", "context"):
            tree[f"{key}s"][0][key] |= value
        else:
            tree[key.replace("_", "-")] = value
    return json.dumps(tree)


@pytest.fixture
def with_kubeconfig(run: Gpunode, tmp_path: Path) -> Any:
    """Run `ADVERTISE` with this text as --kubeconfig."""

    def call(text: str, *more: str, **env: str) -> Any:
        path = tmp_path / "given.yaml"
        path.write_text(text)
        return run(*ADVERTISE, "--kubeconfig", str(path), *more, **env)

    return call


def test_certificates_and_tokens_embedded_in_the_file(api: ApiServer, with_kubeconfig: Any) -> None:
    data = base64.b64encode(Path(api.ca).read_bytes()).decode()
    text = edited(kubeconfig(api), cluster={"certificate-authority": "", "certificate-authority-data": data})
    assert with_kubeconfig(text).code == 0
    assert capacity(api) == "1"


def test_paths_are_relative_to_their_file(api: ApiServer, with_kubeconfig: Any, tmp_path: Path) -> None:
    shutil.copy(api.ca, tmp_path / "ours.crt")
    (tmp_path / "tok").write_text(f"{ADMIN}\n")
    text = kubeconfig(api, tokenFile="tok")
    done = with_kubeconfig(edited(text, cluster={"certificate-authority": "ours.crt"}))
    assert done.code == 0, done.err


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_credential_program_prints_the_token(
    api: ApiServer, with_kubeconfig: Any, tmp_path: Path, version: str
) -> None:
    program = tmp_path / "get token"
    answer = {"kind": "ExecCredential", "status": {"token": ADMIN}}
    program.write_text(f"#!/bin/sh\n[ \"$1$MORE\" = ab ] && echo '{json.dumps(answer)}'\n")
    program.chmod(0o755)
    spec = {
        "apiVersion": f"client.authentication.k8s.io/{version}",
        "command": "./get token",
        "args": ["a"],
        "env": [{"name": "MORE", "value": "b"}],
    }
    done = with_kubeconfig(kubeconfig(api, exec=spec))
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo sorry, sign in first >&2; exit 7", "ended with 7: sorry, sign in first"),
        ("echo no json", "printed no ExecCredential"),
        ('echo {\\"status\\":{}}', "printed neither a token nor a certificate"),
    ],
)
def test_failing_credential_program_is_named(
    api: ApiServer, with_kubeconfig: Any, tmp_path: Path, script: str, message: str
) -> None:
    program = tmp_path / "signer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    spec = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}
    done = with_kubeconfig(kubeconfig(api, exec=spec))
    assert done.code == 3
    assert message in done.err
    assert "kubectl proxy" in done.err


@pytest.mark.parametrize("variable", ["SUDO_USER", "KUBECONFIG"])
def test_user_missing_in_the_user_database_is_not_reported_as_a_bug(
    run: Gpunode, tmp_path: Path, variable: str
) -> None:
    values = {"KUBECONFIG": "", "HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": ""}
    named = {"SUDO_USER": "nosuchuser", "KUBECONFIG": "~nosuchuser/config"}
    done = run(*ADVERTISE, **{**values, variable: named[variable]})
    assert done.code == 3
    assert "this is a bug" not in done.err


def test_hint_names_the_kubeconfig_of_the_user_who_called_sudo(tmp_path: Path) -> None:
    for path in ("root/.kube/config", "etc/kubernetes/admin.conf"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    with pytest.raises(GpunodeError) as caught:
        find(Host(tmp_path, environ={"HOME": "/nowhere", "SUDO_USER": "root"}), Access())
    assert caught.value.hint.startswith(
        "here are /root/.kube/config, /etc/kubernetes/admin.conf; --kubeconfig /root/.kube/config, "
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"current_context": "nowhere"}, "has no context 'nowhere'"),
        ({"current_context": ""}, "has no current context"),
        ({"context": {"cluster": "gone"}}, "names the cluster 'gone', which does not exist"),
        ({"context": {"user": "gone"}}, "names the user 'gone', which does not exist"),
        ({"cluster": {"server": "10.0.0.1:6443"}}, "is not the address of an API server"),
        ({"cluster": {"server": "https://[::1"}}, "is not the address of an API server"),
        ({"cluster": {"server": None}}, "got `null` - at `$.clusters[0].cluster.server`"),
        ({"cluster": {"server": ""}}, "is not the address of an API server"),
        ({"cluster": {"certificate-authority": "/no/ca.crt"}}, "names /no/ca.crt"),
        ({"cluster": {"certificate-authority-data": "!!"}}, "can't be used"),
        ({"user": {"client-certificate-data": "AAAA", "client-key-data": "AAAA"}}, "can't be used"),
        ({"user": {"auth-provider": {"name": "gcp"}}}, "auth-provider"),
        (
            {"user": {"exec": {"command": "x"}}},
            "missing required field `apiVersion` - at `$.users[0].user.exec`",
        ),
        (
            {"user": {"exec": {"command": "x", "apiVersion": "client.authentication.k8s.io/v9"}}},
            "exec's apiVersion 'client.authentication.k8s.io/v9' isn't known",
        ),
        ({"user": {"token": 7}}, "got `int` - at `$.users[0].user.token`"),
        ({"contexts": {"a": 1}}, "got `object` - at `$.contexts`"),
        ({"users": [{"user": {}}]}, "missing required field `name` - at `$.users[0]`"),
    ],
    ids=str,
)
def test_kubeconfig_with_missing_parts_is_refused(
    api: ApiServer, with_kubeconfig: Any, parts: Any, message: str
) -> None:
    done = with_kubeconfig(edited(kubeconfig(api), **parts))
    assert done.code == 3, done.err
    assert message in done.err
    assert api.asked == []


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "!!python/object/apply:os.system [id]", "\x00"])
def test_file_that_is_no_kubeconfig_is_refused(api: ApiServer, with_kubeconfig: Any, text: str) -> None:
    done = with_kubeconfig(text)
    assert done.code == 3, done.err
    assert "Traceback" not in done.err


def test_authority_that_did_not_sign_is_refused(api: ApiServer, with_kubeconfig: Any, tmp_path: Path) -> None:
    from fixtures.api_server import make_certificates

    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other)
    done = with_kubeconfig(edited(kubeconfig(api), cluster={"certificate-authority": str(other / "ca.crt")}))
    assert done.code == 1
    assert "certificate isn't signed by the authority" in done.err
    assert "trying again" not in done.err
    assert api.asked == []


def test_several_kubeconfigs_are_merged(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    tree = json.loads(kubeconfig(api))
    (tmp_path / "one").write_text(json.dumps({"current-context": "test", "contexts": tree["contexts"]}))
    (tmp_path / "two").write_text(json.dumps({**tree, "current-context": "other", "contexts": []}))
    paths = f"{tmp_path / 'one'}:{tmp_path / 'missing'}:{tmp_path / 'two'}"
    done = run(*ADVERTISE, "-o", "json", KUBECONFIG=paths)
    assert done.code == 0, done.err
    # the undo addresses the same cluster, whatever KUBECONFIG and the current context are by then
    undo = shlex.split(done.document["data"]["undo"])[1:]
    assert f"{tmp_path / 'one'}:{tmp_path / 'two'}" in undo and undo[-5:-3] == ["--context", "test"]
    (tmp_path / "one").write_text(json.dumps({"current-context": "gone", "contexts": tree["contexts"]}))
    assert run(*undo, KUBECONFIG="").code == 0
    assert capacity(api) is None


def test_kubectl_proxy_needs_no_other_setting(run: Gpunode, tmp_path: Path, certificates: Path) -> None:
    plain = ApiServer(anonymous="admin")
    plain.add_node("gpu-1", labels={"pool": "a"})
    with Listening(plain, None):
        # a proxy of the environment isn't used for this machine
        done = run(*ADVERTISE, "--server", plain.url, KUBECONFIG="", HTTP_PROXY="http://127.0.0.1:1")
        assert done.code == 0, done.err
        assert f"--server {plain.url} --resource a.b/c --remove" in done.out
    assert capacity(plain) == "1"
    refused = run(*ADVERTISE, "--server", plain.url, "--context", "test")
    assert refused.code == 2


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_real_kubectl_proxy(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    path = str(tmp_path / "kubeconfig")
    proxy = subprocess.Popen(
        ["kubectl", "--kubeconfig", path, "proxy", "--port=0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert proxy.stdout is not None
        address = proxy.stdout.readline().split()[-1]
        done = run(
            "node", "advertise", "--resource", "a.b/c", "--count", "2", "--server", f"http://{address}"
        )
        assert done.code == 0, done.err
    finally:
        proxy.terminate()
        proxy.communicate(timeout=PATIENCE)
    assert api.changes()[0].user == "admin"
    assert api.node("gpu-1")["status"]["allocatable"]["a.b/c"] == "2"


def test_missing_configuration_lists_the_possibilities(run: Gpunode, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run(*ADVERTISE, KUBECONFIG="", HOME=str(empty), KUBERNETES_SERVICE_HOST="")
    assert done.code == 3
    assert "no API server is configured" in done.err
    assert "kubectl proxy" in done.err


def test_home_directory_is_searched_last(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    own = tmp_path / "home" / ".kube"
    own.mkdir(parents=True)
    (own / "config").write_text(kubeconfig(api))
    assert run(*ADVERTISE, KUBECONFIG="", HOME=str(own.parent), KUBERNETES_SERVICE_HOST="").code == 0


def test_under_another_root_nothing_is_queried(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    done = run("--root", str(tmp_path), *ADVERTISE)
    assert (done.code, api.asked) == (3, [])


def test_missing_library_error_has_the_install_command(run: Gpunode, tmp_path: Path) -> None:
    (tmp_path / "lightkube.py").write_text("raise ImportError('No module named lightkube')\n")
    done = run(*ADVERTISE, "-o", "json", PYTHONPATH=str(tmp_path))
    assert done.code == 3
    (error,) = done.document["errors"]
    assert error["code"] == "kubernetes-extra-missing"
    python, *words = shlex.split(error["hint"])
    assert Path(python).samefile(sys.executable), "the interpreter without the library, and no other"
    assert words[:3] == ["-m", "pip", "install"]
    assert [word.split(">")[0].split("<")[0] for word in words[3:]] == [
        *("httpcore2", "httpx2", "lightkube", "msgspec"),
    ]


def test_missing_right_is_reported(api: ApiServer, with_kubeconfig: Any) -> None:
    done = with_kubeconfig(kubeconfig(api, "reader-token"))
    assert done.code == 3
    assert 'User "reader" cannot patch' in done.err
    assert capacity(api) is None


def test_html_page_of_another_server_is_refused(api: ApiServer, run: Gpunode) -> None:
    api.faults.append(Fault("", "", "html"))
    done = run(*ADVERTISE)
    assert (done.code, "not a response of an API server" in done.err) == (1, True)


# --- files of the whole machine, which a command line can't use here ---------------------------------------


def machine(root: Path, environ: dict[str, str], files: dict[str, str]) -> Host:
    for path, text in files.items():
        at = root / path.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
    return Host(root, environ)


def test_service_account_of_a_pod(tmp_path: Path) -> None:
    files = {f"{ACCOUNT}/token": "t", f"{ACCOUNT}/namespace": "gpu\n", f"{ACCOUNT}/ca.crt": "c"}
    host = machine(tmp_path, {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, files)
    found = find(host, Access())
    assert (found.cluster.server, found.namespace) == ("https://[fd00::1]:6443", "gpu")
    assert (found.user.token_file, found.cluster.certificate_auth) == (
        f"{ACCOUNT}/token",
        f"{ACCOUNT}/ca.crt",
    )


@pytest.mark.parametrize(
    "path", ["/etc/kubernetes/kubelet.conf", "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"]
)
def test_credentials_of_the_kubelet(tmp_path: Path, path: str) -> None:
    text = kubeconfig(ApiServer(url="https://10.0.0.1:6443"), "t")
    found = find(machine(tmp_path, {}, {path: text}), Access(kubeconfig="kubelet"))
    assert found.cluster.server == "https://10.0.0.1:6443"
    assert found.options == ("--kubeconfig", "kubelet")
    assert found.source == f"{path}, context test"


def test_server_option_that_is_no_proxy_is_refused(api: ApiServer, run: Gpunode) -> None:
    done = run(*ADVERTISE, "--server", api.url)
    assert (done.code, "--server is for a kubectl proxy" in done.err) == (1, True)


def test_kubeconfigs_of_root_are_suggested_and_not_used(tmp_path: Path) -> None:
    host = machine(tmp_path, {}, {"/etc/kubernetes/admin.conf": "{}"})
    with pytest.raises(GpunodeError) as caught:
        find(host, Access())
    assert "here are /etc/kubernetes/admin.conf" in caught.value.hint


def test_kubelets_account_is_suggested_only_where_no_pod_is_created(tmp_path: Path) -> None:
    host = machine(tmp_path, {}, {"/etc/kubernetes/kubelet.conf": "{}"})
    hints = {}
    for pods in (False, True):
        with pytest.raises(GpunodeError) as caught:
            find(host, Access(pods=pods))
        hints[pods] = caught.value.hint
    assert "here are /etc/kubernetes/kubelet.conf; " in hints[False]
    assert "--kubeconfig kubelet" in hints[False]
    assert hints[True] == "--kubeconfig PATH, or kubectl proxy and --server http://127.0.0.1:8001"


def test_verify_does_not_suggest_the_kubelets_account(run: Gpunode, tmp_path: Path) -> None:
    done = run("verify", "--on", "kubernetes", KUBECONFIG="", HOME=str(tmp_path), KUBERNETES_SERVICE_HOST="")
    assert (done.code, "no API server is configured" in done.err) == (3, True)
    assert "--kubeconfig kubelet" not in done.err


@pytest.mark.parametrize(
    ("option", "environ", "name", "source"),
    [
        ("n1", {"NODE_NAME": "n2"}, "n1", "--node"),
        ("", {"NODE_NAME": "n2"}, "n2", "NODE_NAME"),
        ("", {}, "host-3.example.com", "this machine's name"),
    ],
)
def test_name_of_the_node(
    tmp_path: Path, option: str, environ: dict[str, str], name: str, source: str
) -> None:
    host = machine(tmp_path, environ, {"/proc/sys/kernel/hostname": "Host-3.Example.com\n"})
    assert node_name(host, option) == (name, source)


def test_directory_is_not_a_kubeconfig(run: Gpunode, tmp_path: Path) -> None:
    done = run(*ADVERTISE, "--kubeconfig", str(tmp_path))
    assert done.code == 3, "like any other file that is no kubeconfig"
    assert done.err.splitlines() == [
        f"error: {tmp_path} is a directory",
        f"hint: name a file in it: --kubeconfig {tmp_path}/config",
    ]


def test_machine_without_a_name_needs_the_node_option(tmp_path: Path) -> None:
    with pytest.raises(GpunodeError) as caught:
        node_name(machine(tmp_path, {}, {}), "")
    assert (caught.value.exit_code, caught.value.hint) == (2, "name it: --node NAME")


def test_secrets_are_in_no_text_about_a_connection(tmp_path: Path) -> None:
    text = kubeconfig(ApiServer(url="https://10.0.0.1:6443"), "very-secret")
    found = find(machine(tmp_path, {}, {"/k": text}), Access(kubeconfig="/k"))
    assert found.user.token == "very-secret"
    assert "very-secret" not in repr(found)
