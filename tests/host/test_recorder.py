"""A host that records all queries, on the machine that runs this test."""

import json
import os
import sys
from typing import Any

import pytest

from fixtures.engines import start_containerd
from gpunode.daemons.cri import Cri
from gpunode.daemons.docker import DockerApi
from gpunode.errors import DaemonError, Unreadable
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.host.bundle import UNITS, daemon_logs, files_of, links_of, packed
from gpunode.host.process import Completed, LineChild
from gpunode.host.recorder import RecordingHost
from gpunode.host.redact import HIDDEN, Redaction, own_names, without_secrets


def test_file_behind_symlinks_is_recorded_with_the_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("text")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "gone").symlink_to("nowhere")
    host = RecordingHost()
    assert host.read_text(f"{tmp_path}/link/file") == "text"
    assert host.is_symlink(f"{tmp_path}/gone") and not host.exists(f"{tmp_path}/gone")
    assert host.kept.files == {f"{tmp_path}/real/file": b"text"}
    assert host.kept.links == {f"{tmp_path}/link": "real", f"{tmp_path}/gone": "nowhere"}


def test_file_that_was_only_tested_for_existence_has_no_text(tmp_path):
    (tmp_path / "secret").write_text("text")
    (tmp_path / "program").write_text("#!/bin/sh\nsecret")
    (tmp_path / "program").chmod(0o755)
    host = RecordingHost()
    assert host.is_file(f"{tmp_path}/secret") and host.executable(f"{tmp_path}/program")
    inside = files_of(host.kept, Redaction())
    assert inside[f"{tmp_path}/secret"[1:]] == b""
    assert inside[f"{tmp_path}/program"[1:]] == b"#!/bin/sh\n"


def test_root_of_another_process_is_not_recorded_as_a_link():
    host = RecordingHost()
    host.exists(f"/proc/{os.getpid()}/root/etc/passwd")
    assert f"/proc/{os.getpid()}/root/etc/passwd" in host.kept.files
    assert f"/proc/{os.getpid()}/root" not in links_of(host.kept, Redaction())


def test_commands_are_recorded_except_our_own_and_missing_ones():
    host = RecordingHost()
    host.run(["true"])
    host.run(["sleep", "60"], timeout=0.05)
    host.run(["no-such-program-at-all"])
    host.run([sys.executable, "-c", ""])
    commands = host.kept.recording["commands"]
    assert commands["true"] == {"code": 0, "stdout": "", "stderr": ""}
    assert commands["sleep 60"]["timedOut"] is True
    assert len(commands) == 2


def test_file_systems_of_a_report_can_be_read_from_the_bundle(tmp_path):
    host = RecordingHost()
    live = host.file_system("/")
    (tmp_path / ".gpunode").mkdir()
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps(host.kept.recording))
    assert live is not None and Host(tmp_path).file_system("/") == live


def test_oversized_logs_and_responses_are_truncated_and_reported(monkeypatch):
    monkeypatch.setattr("gpunode.host.recorder.MOST_FILE", 10)
    monkeypatch.setattr(Host, "kernel_log", lambda self: ("first", "4444", "last"))
    host = RecordingHost()
    assert host.kernel_log() == ("first", "4444", "last")
    assert host.kept.log == ["4444", "last"]
    assert len(host.run(["seq", "100"]).stdout) > 200
    assert host.kept.recording["commands"]["seq 100"]["stdout"] == "1\n2\n3\n4\n5\n"
    assert host.kept.left_out == {
        "/dev/kmsg": "the first 1 lines exceed the limit",
        "stdout of seq 100": "292 characters exceed the limit",
    }


def test_file_unreadable_for_this_user_is_recorded_as_such(monkeypatch):
    def closed(self, path, limit=0):
        raise Unreadable(f"can't read {path}: Permission denied")

    monkeypatch.setattr(Host, "read_bytes", closed)
    host = RecordingHost()
    with pytest.raises(Unreadable):
        host.read_text("/etc/shadow")
    assert host.kept.recording["unreadable"] == {"/etc/shadow": "can't read /etc/shadow: Permission denied"}


def test_nvml_is_recorded_in_its_own_section(monkeypatch):
    def child(code):
        argv = (sys.executable, "-ISc", code)
        monkeypatch.setattr(Host, "start_child", lambda self, _, **more: LineChild(argv, os.environ))

    inventory = '{"inventory": {"driverVersion": "580.1", "cudaVersion": "13.0", "gpus": []}}'
    child(f"print('{inventory}'); print('{{\"done\": true}}')")
    host = RecordingHost()
    found = probe(host, condition=True)
    assert found.inventory is not None
    assert set(host.kept.recording["nvml"]) == {"inventory", "conditions"}
    child("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    host = RecordingHost()
    assert "SIGSEGV" in probe(host).message
    assert host.kept.recording["nvml"] == {"problem": probe(host).message}


@pytest.mark.containerd
def test_real_daemon_responds_the_same_from_the_bundle(tmp_path):
    from gpunode.host.bundle import described, unpacked

    with start_containerd() as engine:
        host = RecordingHost()
        assert host.socket_state(engine.socket) == "listening"
        with Cri(host, engine.socket) as client:
            status = client.status()
    inside = files_of(host.kept, Redaction())
    beside = described(links_of(host.kept, Redaction()), {}, {})
    (tmp_path / "b.tar.gz").write_bytes(packed("t", inside, host.kept, beside, 0.0))
    with unpacked(tmp_path / "b.tar.gz") as root, Cri(Host(root), engine.socket) as client:
        again = client.status()
    assert (again.handlers, again.default_handler, again.conditions) == (
        status.handlers,
        status.default_handler,
        status.conditions,
    )


@pytest.mark.parametrize(
    "query",
    [
        lambda host, socket: DockerApi(host, socket, 0.2).info(),
        lambda host, socket: Cri(host, socket, timeout=0.2).status(),
    ],
    ids=["docker", "cri"],
)
def test_hanging_daemon_hangs_in_the_bundle_too(tmp_path, query):
    from tests.checks.test_patience_hanging_daemons import silent_socket

    with silent_socket(tmp_path / "s") as silent:
        host = RecordingHost()
        with pytest.raises(DaemonError) as first:
            query(host, silent)
    (tmp_path / ".gpunode").mkdir()
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps(host.kept.recording))
    with pytest.raises(DaemonError) as second:
        query(Host(tmp_path), silent)
    assert (second.value.code, second.value.message) == (first.value.code, first.value.message)
    assert first.value.code == "timeout"


@pytest.mark.parametrize(
    ("end", "reason", "queries"),
    [
        (Completed((), 1, "", "No journal files were found.\n"), "No journal files were found.", len(UNITS)),
        (Completed((), -9, "", "", timed_out=True), "journalctl didn't finish within 5 s", 2),
        (Completed((), 127, "", "no such program\n"), "no such program", 2),
    ],
    ids=["refused", "hangs", "missing"],
)
def test_logs_of_daemons_are_in_a_report_or_the_reason_is(monkeypatch, end, reason, queries):
    ended = []

    def run(_host, argv, timeout):
        ended.append(argv)
        return Completed(argv, 0, "a line\n", "") if len(ended) == 1 else end

    monkeypatch.setattr(Host, "run", run)
    logs, missing = daemon_logs(Host())
    assert logs == {UNITS[0]: "a line\n"} and missing[UNITS[1]] == reason
    assert len(ended) == queries


SECRETS = {
    '{"auth": "dXNlcjpwYXNz", "x": 1}': '{"auth": "REDACTED", "x": 1}',
    'password = "hunter2" # mine': 'password = "REDACTED" # mine',
    "/usr/bin/x\0--token\0abc\0--verbose": "/usr/bin/x\0--token\0REDACTED\0--verbose",
    "https_proxy=http://me:pw@proxy:3128/": "https_proxy=http://REDACTED@proxy:3128/",
    "K3S_TOKEN=K10aa::server:bb": "K3S_TOKEN=REDACTED",
    "token: |\n  abc\n  def\nnext: 1": "token: REDACTED\nnext: 1",
    'inner: "{\\"auth\\": \\"abc\\"}"': 'inner: "{\\"auth\\": \\"REDACTED\\"}"',
    'X-Api-Key = ["abc", "d"]': 'X-Api-Key = ["REDACTED", "REDACTED"]',
    "X-Auth-Token = [\n  'abc', # mine\n]\nnext = 1": "X-Auth-Token = [\n  'REDACTED', # mine\n]\nnext = 1",
    "X-Token:\n- abc\n- d\nnext: 1": "X-Token:\n- REDACTED\n- REDACTED\nnext: 1",
    "Authorization:\n  - Bearer abcdefgh\nnext:\n  - x": "Authorization:\n  - REDACTED\nnext:\n  - x",
    "//s/x /mnt cifs user=me,pass=hunter2,ro": "//s/x /mnt cifs user=me,pass=REDACTED,ro",
    "baseurl=https://h/x?v=1&X-Amz-Signature=abc&y=2": "baseurl=https://h/x?v=1&X-Amz-Signature=REDACTED&y=2",
    "https://h/x?sig=a%2Fb": "https://h/x?sig=REDACTED",
    "docker swarm join SWMTKN-1-49nj1cmql0jkz5s954yi3oex": "docker swarm join REDACTED",
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4eHh4In0.c2ln": "REDACTED",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx": (
        "-----BEGIN RSA PRIVATE KEY----- REDACTED\nx"
    ),
}
HARMLESS = (
    "authentication:\n  anonymous:\n    enabled: false",
    "authorization:\n  mode: Webhook",
    "tokenFile: /etc/token",
    "accept-nvidia-visible-devices-envvar-when-unprivileged = true",
    'author = "Jane"',
    "tokenFiles:\n- /etc/a\n- /etc/b\nstage:\n  pass: 3",
    'authorized-uids = ["0", "1"]\nauth-plugins = ["x"]',
    "sig_key:        5A:3C\nsig_hashalgo:   sha256\nsignature:      1B:2D",
    "Passthrough: [1, 2]\nkeys: [a]",
    "image ghcr.io/nvidia/x@sha256:aaaa",
    "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
)


@pytest.mark.parametrize("text", SECRETS)
def test_secret_is_removed_and_the_rest_stays(text):
    assert without_secrets(text) == SECRETS[text]
    assert without_secrets(SECRETS[text]) == SECRETS[text]


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_secrets_is_unchanged(text):
    assert without_secrets(text) == text


def test_any_value_of_a_secret_name_is_removed():
    assert Redaction().value({"authToken": ["a", {"b": "c"}], "n": 1}) == {
        "authToken": [HIDDEN, {"b": "c"}],
        "n": 1,
    }


def test_only_gpu_settings_of_an_image_are_recorded():
    from gpunode.host.recorder import Kept

    env = ["PATH=/bin", "NVIDIA_REQUIRE_CUDA=cuda>=12", "DB_HOST=mine", "CUDA_VERSION=12"]
    inspected = json.dumps([{"Config": {"Env": env, "Cmd": ["mine"]}, "History": "mine"}])
    line = "podman image inspect -- x"
    recording: dict[str, dict[str, Any]] = {
        "daemons": {"/s": {"images": {"x": {"Env": env, "Labels": {"a": "mine"}}}, "info": {}}},
        "commands": {line: {"stdout": inspected, "code": 0}, "true": {"stdout": "1"}},
    }
    recorded = files_of(Kept(recording=recording), Redaction())[".gpunode/recording.json"].decode()
    kept = json.loads(recorded)
    ours = {"Env": ["NVIDIA_REQUIRE_CUDA=cuda>=12", "CUDA_VERSION=12"]}
    assert "mine" not in recorded and "mine" in json.dumps(recording)
    assert kept["daemons"]["/s"] == {"images": {"x": ours}, "info": {}}
    assert json.loads(kept["commands"][line]["stdout"]) == [{"Config": ours}]
    assert kept["commands"]["true"] == {"stdout": "1"}


@pytest.mark.full
def test_long_line_is_redacted_quickly():
    import time

    started = time.process_time()
    for text in (
        "A" * 250_000 + " token",
        "token " * 25_000,
        "x=" * 75_000 + "key",
        "-" * 125_000 + "key",
        "token = [" * 12_500,
        "token:\n" * 25_000 + "- x\n" * 25_000,
    ):
        without_secrets(text)
    assert time.process_time() - started < 20  # 1.5 s on an idle machine, minutes if it were quadratic


def test_host_name_that_is_a_common_word_is_replaced_only_as_a_whole_value():
    redaction = Redaction(own_names(["docker\n"]))
    assert redaction.text("docker\n") == "host-1\n"
    assert redaction.text("/etc/docker/daemon.json") == "/etc/docker/daemon.json"
