"""`gpunode cdi ...` as a user types it: a stub NVML under the real ctypes path, and recorded machines."""

import json
import os
import re
import signal
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from fixtures.driver_tree import driver_tree, make_nodes
from fixtures.machines import machine as machine_spec
from fixtures.machines import merged, recorded_host
from fixtures.scenario import Fault, machine, mixed_layout, with_mig
from fixtures.stubs import have_compiler
from gpunode.cdi.spec import MARKER
from gpunode.commands.demo import build_machine
from gpunode.host import Host
from tests.cli import clean_environment, command, fresh_gpunode, gpunode
from tests.integration.conftest import may_mount
from tests.required import required
from tests.waiting import PATIENCE, eventually

STANDARD = "var/run/cdi/nvidia.yaml"


@pytest.fixture
def node(tmp_path):
    """A live machine with test NVML, libraries and device files; devices need the right to create them."""
    if not have_compiler() or os.geteuid() != 0:
        assert os.environ.get("CI") != "true", "CI=true says that gcc and root are here"
        pytest.skip("needs gcc, and root for device files")
    return driver_tree(tmp_path, machine(8))


def generate(node, *arguments, start=gpunode):
    return start("cdi", "generate", *node.options, "--hooks", "none", *arguments, env=node.env)


def names(text):
    return [device["name"] for device in yaml.safe_load(text)["devices"]]


# --- generate -------------------------------------------------------------------------------------------


def test_specification_is_printed_alone_on_stdout(node):
    ran = generate(node)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(MARKER)
    assert names(ran.out)[:8] == [str(index) for index in range(8)]
    assert yaml.safe_load(ran.out)["cdiVersion"] == "0.5.0"


def test_eight_gpus_take_less_than_a_second_of_processor_time(node):
    before = os.times()
    assert generate(node, start=fresh_gpunode).code == 0
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 1.0


def test_file_is_written_atomically_and_only_if_it_changes(node, tmp_path):
    path = tmp_path / "new/cdi/nvidia.yaml"
    assert generate(node, "--output-file", str(path)).out.startswith(f"{path} created")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    before = path.stat()
    assert generate(node, "--output-file", str(path)).out.startswith(f"{path} unchanged")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    node.write(machine(2))
    assert generate(node, "--output-file", str(path)).out.startswith(f"{path} updated")
    assert path.stat().st_ino != before.st_ino
    assert list(path.parent.iterdir()) == [path]


def test_extension_selects_the_format_and_is_added_if_missing(node, tmp_path):
    assert generate(node, "--output", str(tmp_path / "a.json")).code == 0
    assert generate(node, "--output", str(tmp_path / "b")).code == 0
    assert generate(node, "--output", str(tmp_path / "c"), "--format", "json").code == 0
    a, b, c = ((tmp_path / name).read_text() for name in ("a.json", "b.yaml", "c.json"))
    assert json.loads(a) == json.loads(c) == yaml.safe_load(b)


def test_dash_o_selects_the_output_format(node, tmp_path):
    path = tmp_path / "nvidia.yaml"
    document = generate(node, "--output-file", str(path), "-o", "json").document
    assert (document["kind"], document["data"]["path"], document["data"]["action"]) == (
        "CdiSpec", str(path), "created",
    )  # fmt: skip
    assert document["data"]["spec"] == yaml.safe_load(path.read_text())
    ran = generate(node, "--output", "json")
    assert (ran.code, "-o json" in ran.err) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--format", "xml"),
        ("--hooks", "all"),
        ("--device-name", "serial"),
        ("--vendor", "nvidia com"),
        ("--class", ""),
        ("--library-path", "lib"),
        ("--output", "/nonexistent/a.yaml", "--format", "json"),
    ],
)
def test_contradicting_options_are_a_usage_error_with_a_hint(arguments):
    ran = gpunode("cdi", "generate", *arguments)
    assert (ran.code, ran.err.count("hint: ")) == (2, 1)


def test_mig_devices_replace_their_gpu(node):
    """The driver's table of capabilities is in /proc, which only a private mount namespace can replace."""
    if not may_mount():
        pytest.skip("needs the right to mount")
    scenario = with_mig(machine(2), 1, mixed_layout(1))
    node.write(scenario)
    table, number = [], 100
    for mig in mixed_layout(1):
        for part in ("", f"ci{mig.ci}/"):
            table.append(f"gpu1/gi{mig.gi}/{part}access {number}")
            number += 1
    (node.directory / "mig-minors").write_text("\n".join(["config 1", "monitor 2", *table]) + "\n")
    caps = [f"nvidia-caps/nvidia-cap{n}" for n in range(100, number)]
    make_nodes(node.dev_root, caps)
    place = "mount -t tmpfs none /proc/driver && mkdir /proc/driver/nvidia-caps && cp"
    script = f'{place} {node.directory}/mig-minors /proc/driver/nvidia-caps/ && exec "$@"'
    argv = command("cdi", "generate", *node.options, "--hooks", "none")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *argv],
        env=clean_environment(node.env), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert names(done.stdout)[:5] == ["0", "1:0", "1:1", "1:2", "1:3"]
    device = yaml.safe_load(done.stdout)["devices"][1]
    assert [one["path"] for one in device["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap100", "/dev/nvidia-caps/nvidia-cap101",
    ]  # fmt: skip


def test_lost_gpu_is_reported_and_does_not_hide_the_others(node):
    node.write(machine(3).with_gpu(1, lost=True))
    ran = generate(node)
    assert (ran.code, names(ran.out)[:2]) == (0, ["0", "2"])
    assert re.search(r"(?m)^GPU 1 is left out: ", ran.err)


def test_failing_nvml_leaves_the_old_file_unchanged(node, tmp_path):
    path = tmp_path / "nvidia.yaml"
    generate(node, "--output-file", str(path))
    before = path.read_bytes()
    node.write(machine(1).with_faults(Fault("nvmlInitWithFlags", abort=True)))
    ran = generate(node, "--output-file", str(path))
    assert ran.code != 0
    assert "hint: " in ran.err
    assert path.read_bytes() == before


# --- faults of the output path --------------------------------------------------------------------------


def test_directory_in_place_of_the_file_is_named(node, tmp_path):
    path = tmp_path / "nvidia.yaml"
    path.mkdir()
    ran = generate(node, "--output-file", str(path))
    assert (ran.code, str(path) in ran.err, "hint: " in ran.err) == (1, True, True)
    assert list(path.iterdir()) == []


def test_symlink_is_written_through(node, tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "nvidia.yaml"
    link.symlink_to("real/target.yaml")
    assert generate(node, "--output", str(link)).code == 1  # a link without a target is not created
    (tmp_path / "real/target.yaml").write_text("old")
    assert generate(node, "--output", str(link)).code == 0
    assert link.is_symlink()
    assert (tmp_path / "real/target.yaml").read_text().startswith(MARKER)


def test_read_only_file_system_is_named(node, tmp_path):
    if not may_mount():
        pytest.skip("needs the right to mount")
    (tmp_path / "run").mkdir()
    script = f'mount -t tmpfs -o ro none {tmp_path}/run && exec "$@"'
    path = tmp_path / "run/cdi/nvidia.yaml"
    argv = command("cdi", "generate", *node.options, "--hooks", "none", "--output-file", str(path))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *argv],
        env=clean_environment(node.env), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "read-only" in done.stderr.lower()) == (3, True), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_no_files(number, node, tmp_path):
    node.write(machine(1).with_faults(Fault("nvmlInitWithFlags", hang=600.0)))
    path = tmp_path / "cdi/nvidia.yaml"
    argv = command("cdi", "generate", *node.options, "--hooks", "none", "--output-file", str(path))
    with subprocess.Popen(argv, env=clean_environment(node.env), stderr=subprocess.PIPE) as child:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        assert eventually(lambda: children.read_text().strip())
        child.send_signal(number)
        child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    assert not path.parent.exists()


# --- refresh, on a recorded machine ---------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path):
    return recorded_host("healthy-h100", tmp_path).root


def refresh(root, *arguments):
    return gpunode("cdi", "refresh", "--root", str(root), *arguments, "-o", "json")


def actions(ran):
    return [(change["path"], change["action"]) for change in ran.document["data"]["changes"]]


def test_refresh_writes_the_standard_file_once(recorded):
    path = recorded / STANDARD
    assert actions(refresh(recorded, "--dry-run")) == [("/" + STANDARD, "created")]
    assert not path.exists()
    assert actions(refresh(recorded)) == [("/" + STANDARD, "created")]
    before = path.stat()
    assert actions(refresh(recorded)) == [("/" + STANDARD, "unchanged")]
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_refresh_without_a_driver_removes_only_our_own_file(tmp_path):
    spec = machine_spec("module-not-loaded")
    for text, expected in ((MARKER + "\n", "removed"), ("---\ncdiVersion: 0.5.0\n", "unchanged")):
        root = tmp_path / expected
        build_machine(merged(spec, {"files": {"/" + STANDARD: text}}), root)
        ran = refresh(root)
        assert (ran.code, actions(ran)) == (0, [("/" + STANDARD, expected)])
        assert (root / STANDARD).exists() == (expected == "unchanged")


def test_refresh_without_driver_and_file_does_nothing(tmp_path):
    root = build_machine(machine_spec("module-not-loaded"), tmp_path)
    ran = refresh(root)
    assert (ran.code, actions(ran)) == (0, [])


def test_duplicate_file_for_the_same_devices_is_refused(recorded):
    assert refresh(recorded).code == 0
    path = recorded / STANDARD
    path.rename(path.with_name("other.yaml"))
    ran = refresh(recorded)
    error = ran.document["errors"][0]
    assert (ran.code, error["code"]) == (3, "cdi-conflict")
    assert f"rm /var/run/cdi/other.yaml, or write over it: gpunode --root {recorded} " in error["hint"]
    assert error["hint"].endswith(f" (under --root {recorded})")
    assert not path.exists()


def test_old_file_in_etc_is_hidden_and_named(recorded):
    assert refresh(recorded).code == 0
    old = recorded / "etc/cdi/nvidia.yaml"
    old.parent.mkdir(parents=True)
    old.write_bytes((recorded / STANDARD).read_bytes())
    (message,) = refresh(recorded).document["messages"]
    assert "rm /etc/cdi/nvidia.yaml" in message


def test_broken_other_file_does_not_stop_the_refresh(recorded):
    place = recorded / "var/run/cdi"
    place.mkdir(parents=True)
    (place / "nvidia-broken.yaml").write_text("kind: [nvidia.com/gpu")
    (place / ".nvidia.yaml.abc.gpunode").write_text("half a fi")
    assert refresh(recorded).code == 0
    listed = gpunode("cdi", "list", "--root", str(recorded), "-o", "json").document
    assert listed["status"] == "warn"
    problems = {file["path"]: file["problem"] for file in listed["data"]["files"] if file["problem"]}
    assert list(problems) == ["/var/run/cdi/nvidia-broken.yaml"]


def test_units_are_refused_without_systemd_and_beside_nvidias(recorded, tmp_path):
    (recorded / "run/systemd/system").rmdir()
    ran = refresh(recorded, "--install")
    assert (ran.code, ran.document["errors"][0]["code"]) == (3, "no-systemd")
    (recorded / "run/systemd/system").mkdir()
    wants = recorded / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    unit = recorded / "etc/systemd/system/nvidia-cdi-refresh.service"
    unit.write_text("[Service]\nExecStart=/usr/bin/nvidia-ctk cdi generate\n")
    (wants / unit.name).symlink_to(f"/etc/systemd/system/{unit.name}")
    ran = refresh(recorded, "--install")
    assert (ran.code, ran.document["errors"][0]["code"]) == (3, "nvidia-cdi-refresh")
    assert "systemctl disable --now nvidia-cdi-refresh.path" in ran.document["errors"][0]["hint"]


def test_units_are_installed_and_removed_but_foreign_files_stay(recorded):
    environment = {"GPUNODE_STATE_DIR": "/state"}
    argv = ("cdi", "refresh", "--root", str(recorded), "-o", "json")
    installed = gpunode(*argv, "--install", env=environment)
    assert [action for _, action in actions(installed)] == ["created"] * 3
    again = gpunode(*argv, "--install", env=environment)
    assert [action for _, action in actions(again)] == ["unchanged"] * 3
    removed = gpunode(*argv, "--remove", env=environment)
    assert [action for _, action in actions(removed)] == ["removed"] * 3
    stranger = recorded / "etc/systemd/system/gpunode-cdi-refresh.path"
    stranger.write_text("[Path]\n")
    refused = gpunode(*argv, "--install", env=environment)
    assert (refused.code, stranger.read_text()) == (1, "[Path]\n")


@pytest.mark.parametrize(
    ("containerd", "version", "node", "groups"),
    [
        ("1.7.2", "0.5.0", {"fileMode": 0o666}, None),
        ("2.2.1", "0.7.0", {"fileMode": 0o666, "gid": 44}, [44]),
    ],
)
def test_drm_node_group_is_added_if_every_engine_supports_groups(containerd, version, node, groups, tmp_path):
    spec = machine_spec("healthy-h100")
    gpu = spec["recording"]["nvml"]["inventory"]["gpus"][0]
    spec["files"][f"/sys/bus/pci/devices/{gpu['pci']}/drm/card0/dev"] = "226:0\n"
    device = {"major": 226, "minor": 0, "mode": "0660", "gid": 44}
    spec["recording"]["devices"]["/dev/dri/card0"] = device
    spec["recording"]["commands"]["/usr/bin/containerd --version"]["stdout"] = f"containerd x v{containerd} y"
    root = build_machine(spec, tmp_path / "node")
    assert refresh(root).code == 0
    tree = yaml.safe_load((root / STANDARD).read_text())
    edits = tree["devices"][0]["containerEdits"]
    assert tree["cdiVersion"] == version
    assert edits["deviceNodes"][1] == {"path": "/dev/dri/card0", **node}
    assert edits.get("additionalGids") == groups


# --- the file that nvidia-ctk writes --------------------------------------------------------------------


def as_nvidia_ctk_writes(root, **other_numbers):
    """The file of nvidia-ctk 1.19: Go omits numbers that are 0, so /dev/nvidia-uvm has no minor."""
    refresh(root)
    tree = yaml.safe_load((root / STANDARD).read_text())
    host = Host(root, environ={})
    for holder in (tree, *tree["devices"]):
        for node in holder["containerEdits"].get("deviceNodes", ()):
            device = required(host.device(node["path"]))
            numbers = {"major": device.major, "minor": device.minor} | other_numbers
            node |= {name: number for name, number in numbers.items() if number}
            node |= {"fileMode": 438, "permissions": "rwm"}
    text = "---\n" + yaml.safe_dump(tree)
    (root / STANDARD).write_text(text)
    return text


def nvidia_refresh_service(root):
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    unit = root / "etc/systemd/system/nvidia-cdi-refresh.service"
    unit.write_text("[Service]\nExecStart=/usr/bin/nvidia-ctk cdi generate\n")
    (wants / unit.name).symlink_to(f"/etc/systemd/system/{unit.name}")


def doctor_status(root, identifier):
    document = gpunode("doctor", "--root", str(root), "--only", identifier, "-o", "json").document
    return next(item["status"] for item in document["data"]["findings"] if item["id"] == identifier)


def test_file_of_nvidia_ctk_without_zero_minors_is_current(recorded):
    text = as_nvidia_ctk_writes(recorded)
    assert "minor: 1\n" in text
    assert "minor: 0" not in text
    assert set(states(recorded).values()) == {"usable"}
    assert doctor_status(recorded, "cdi-spec-stale") == "pass"
    nvidia_refresh_service(recorded)
    assert actions(refresh(recorded)) == [("/" + STANDARD, "unchanged")]


@pytest.mark.parametrize("change", [{"major": 77}, {"library": "535.104.05"}, {"name": "GPU-gone"}])
def test_refresh_replaces_every_file_that_doctor_calls_stale(recorded, change):
    """Even one that NVIDIA's own service wrote: otherwise the advice would never clear the finding."""
    text = as_nvidia_ctk_writes(recorded, **({"major": 77} if "major" in change else {}))
    if "library" in change:
        text = re.sub(r"(hostPath: \S+/libcuda\.so\.)[\d.]+", rf"\g<1>{change['library']}", text)
    if "name" in change:
        tree = yaml.safe_load(text)
        tree["devices"].append({"name": change["name"], "containerEdits": {"env": ["A=b"]}})
        text = yaml.safe_dump(tree)
    (recorded / STANDARD).write_text(text)
    nvidia_refresh_service(recorded)
    assert doctor_status(recorded, "cdi-spec-stale") in ("warn", "fail")
    assert actions(refresh(recorded)) == [("/" + STANDARD, "updated")]
    assert doctor_status(recorded, "cdi-spec-stale") == "pass"


# --- options of nvidia-ctk ------------------------------------------------------------------------------

HOOK_HELP = "COMMANDS:\n   create-symlinks  x\n   update-ldcache  x\n   enable-cuda-compat  x\n\nOPTIONS:\n"


@pytest.fixture
def with_hooks(tmp_path):
    spec = machine_spec("healthy-h100")
    spec["executables"].append("/opt/nvidia-cdi-hook")
    spec["recording"]["commands"]["/opt/nvidia-cdi-hook --help"] = {"stdout": HOOK_HELP}
    return build_machine(spec, tmp_path / "node")


def specification(root, *arguments):
    ran = gpunode("cdi", "generate", "--root", str(root), *arguments)
    assert ran.code == 0, ran.err
    return yaml.safe_load(ran.out)


def test_only_chosen_devices_are_described(recorded):
    tree = specification(recorded, "--device-id", "1", "--device-id", "3", "--no-all-device")
    assert [device["name"] for device in tree["devices"]][:2] == ["1", "3"]
    assert "all" not in [device["name"] for device in tree["devices"]]
    ran = gpunode("cdi", "generate", "--root", str(recorded), "--device-id", "9")
    assert (ran.code, "there is no such device" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("driver-lib-mismatch", "(NVML 18)", "gpunode --root ROOT doctor --only driver-lib-mismatch"),
        ("nvml-hang", "the GPUs can't be listed", "gpunode --root ROOT doctor"),
        ("wsl2-linux-driver", "not those of wsl2", "nvidia-ctk cdi generate --mode=wsl"),
    ],
)
def test_reason_is_reported_if_the_gpus_cannot_be_described(name, error, hint, tmp_path):
    root = str(recorded_host(name, tmp_path / "m").root)
    ran = gpunode("cdi", "generate", "--root", root)
    assert ran.code != 0 and error in ran.err and hint.replace("ROOT", root) in ran.err


def test_mig_device_is_chosen_by_its_index(tmp_path):
    tree = specification(recorded_host("healthy-mig-h100", tmp_path / "m").root, "--device-id", "0:1")
    assert [device["name"] for device in tree["devices"]][:1] == ["0:1"]
    assert "0:0" not in [device["name"] for device in tree["devices"]]


def test_hooks_use_the_program_and_names_from_the_options(with_hooks):
    arguments = ("--nvidia-cdi-hook-path", "/opt/nvidia-cdi-hook", "--ldconfig-path", "/opt/ldconfig")
    hooks = specification(with_hooks, *arguments)["containerEdits"]["hooks"]
    assert {hook["path"] for hook in hooks} == {"/opt/nvidia-cdi-hook"}
    cache = next(hook["args"] for hook in hooks if "update-ldcache" in hook["args"])
    assert cache[2:4] == ["--ldconfig-path", "/opt/ldconfig"]
    names = [hook["args"][1] for hook in hooks]
    less = specification(with_hooks, *arguments, "--disable-hook", "enable-cuda-compat")
    left = [hook["args"][1] for hook in less["containerEdits"]["hooks"]]
    assert left == [name for name in names if name != "enable-cuda-compat"]
    both = ("--disable-hook", "all", "--enable-hook", "update-ldcache")
    one = specification(with_hooks, *arguments, *both)["containerEdits"]["hooks"]
    assert [hook["args"][1] for hook in one] == ["update-ldcache"]
    assert "hooks" not in specification(with_hooks, *arguments, "--disable-hook", "all")["containerEdits"]
    missing = ("--nvidia-cdi-hook-path", "/opt/none")
    ran = gpunode("cdi", "generate", "--root", str(with_hooks), *missing)
    assert (ran.code, "/opt/none" in ran.err) == (3, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("cdi", "generate", "--mode", "wsl"),
        ("cdi", "generate", "--feature-flag", "enable-coherent-annotations"),
        ("cdi", "generate", "--enable-hook", "chmod"),
        ("configure-runtime", "--runtime", "docker", "--config-source", "command"),
        ("configure-runtime", "--runtime", "docker", "--executable-path", "/usr/bin/dockerd"),
        ("configure-runtime", "--runtime", "crio", "--config-mode", "oci-hook"),
        ("configure-runtime", "--runtime", "crio", "--oci-hook-path", "/tmp/hook.json"),
        ("configure-runtime", "--runtime", "crio", "--nvidia-runtime-hook-path", "/usr/bin/hook"),
    ],
)
def test_option_of_nvidia_ctk_without_counterpart_is_refused_with_the_reason(arguments, recorded):
    ran = gpunode(*arguments, "--root", str(recorded))
    assert (ran.code, "has no counterpart" in ran.err, "hint: " in ran.err) == (2, True, True)


def test_synonymous_options_of_nvidia_ctk_are_accepted(docker_elsewhere):
    words = ("--cdi.enable", "--config-mode", "config-file")
    argv = ("configure-runtime", "--runtime", "docker", "--dry-run", "--root", str(docker_elsewhere))
    ran = gpunode(*argv, *words)
    assert (ran.code, '"cdi": true' in ran.out) == (0, True)
    assert specification(docker_elsewhere, "--mode", "nvml", "--feature-flag", "disable-ipc-discoverer")


def test_specifications_are_listed_from_the_directories_in_the_options(recorded):
    refresh(recorded)
    other = recorded / "opt/specs/nvidia.yaml"
    other.parent.mkdir(parents=True)
    other.write_bytes((recorded / STANDARD).read_bytes())
    argv = ("cdi", "list", "--root", str(recorded), "-o", "json")
    data = gpunode(*argv, "--spec-dir", "/opt/specs").document["data"]
    assert (data["directories"], {one["path"] for one in data["devices"]}) == (
        ["/opt/specs"], {"/opt/specs/nvidia.yaml"},
    )  # fmt: skip
    both = gpunode(*argv, "--spec-dir", "/opt/specs", "--spec-dir", "/var/run/cdi").document["data"]
    assert {one["state"] for one in both["devices"] if one["path"].startswith("/opt")} == {"hidden"}


# --- engines that read another directory ----------------------------------------------------------------

ELSEWHERE = "/etc/docker/cdi/nvidia.yaml"


@pytest.fixture
def docker_elsewhere(tmp_path):
    spec = machine_spec("healthy-docker-rocky9")
    spec["files"]["/etc/docker/daemon.json"] = '{"cdi-spec-dirs": ["/etc/docker/cdi"]}\n'
    return build_machine(spec, tmp_path / "node")


def configure_cdi(root, command="configure-runtime"):
    environment = {"GPUNODE_STATE_DIR": "/state"}
    argv = (command, "--runtime", "docker", "--cdi", "--root", str(root), "-o", "json")
    return gpunode(*argv, env=environment)


def test_specification_is_written_to_the_directory_docker_is_configured_for(docker_elsewhere):
    root = docker_elsewhere
    ran = configure_cdi(root)
    assert ran.code == 0, ran.err
    assert any(ELSEWHERE in message for message in ran.document["messages"])
    written = (root / ELSEWHERE[1:]).read_bytes()
    assert written.startswith(MARKER.encode()) and written == (root / STANDARD).read_bytes()
    unit = (root / "etc/systemd/system/gpunode-cdi-refresh.service").read_text()
    assert "ReadWritePaths=-/etc/docker/cdi\n" in unit
    assert configure_cdi(root).document["data"]["restart"]["verb"] == "none"


def test_refresh_keeps_the_configured_file_up_to_date_and_unconfigure_removes_it(docker_elsewhere):
    root = docker_elsewhere
    assert configure_cdi(root).code == 0
    path = root / ELSEWHERE[1:]
    path.write_text(path.read_text().replace("nvidia0", "nvidia9"))
    assert actions(refresh(root)) == [("/" + STANDARD, "unchanged"), (ELSEWHERE, "updated")]
    assert path.read_bytes() == (root / STANDARD).read_bytes()
    assert configure_cdi(root, "unconfigure-runtime").code == 0
    assert not path.exists() and not (root / STANDARD).exists()


def test_foreign_file_in_that_directory_is_not_touched(docker_elsewhere):
    path = docker_elsewhere / ELSEWHERE[1:]
    path.parent.mkdir(parents=True)
    path.write_text("---\ncdiVersion: 0.5.0\n")
    assert [changed for changed, _ in actions(refresh(docker_elsewhere))] == ["/" + STANDARD]
    other = path.with_name("mine.yaml")
    refresh(docker_elsewhere)
    other.write_bytes((docker_elsewhere / STANDARD).read_bytes())
    ran = configure_cdi(docker_elsewhere)
    assert (ran.code, ran.document["errors"][0]["code"]) == (3, "cdi-conflict")


# --- list -----------------------------------------------------------------------------------------------


def states(root):
    data = gpunode("cdi", "list", "--root", str(root), "-o", "json").document["data"]
    return {(one["path"], one["name"]): one["state"] for one in data["devices"]}


def test_only_the_first_reason_of_a_stale_device_is_shown_in_words(tmp_path):
    root = recorded_host("cdi-spec-stale", tmp_path / "m").root
    devices = gpunode("cdi", "list", "--root", str(root), "-o", "json").document["data"]["devices"]
    assert devices[0]["reason"].endswith(": the loaded driver is 580.159.03; 2 more outdated parts")


def test_file_below_the_root_is_named_with_it(recorded):
    ran = gpunode("cdi", "generate", "--root", str(recorded), "--output-file", "/tmp/c.yaml")
    assert ran.out.startswith(f"/tmp/c.yaml created (under --root {recorded})\n"), ran.err


def test_later_directory_wins_and_duplicates_in_one_directory_conflict(recorded):
    refresh(recorded)
    ours, etc = "/" + STANDARD, "/etc/cdi/nvidia.yaml"
    (recorded / "etc/cdi").mkdir(parents=True)
    (recorded / etc[1:]).write_bytes((recorded / STANDARD).read_bytes())
    seen = states(recorded)
    assert (seen[ours, "nvidia.com/gpu=0"], seen[etc, "nvidia.com/gpu=0"]) == ("usable", "hidden")
    (recorded / "etc/cdi/second.yaml").write_bytes((recorded / STANDARD).read_bytes())
    assert set(states(recorded).values()) == {"conflict"}


def test_missing_device_file_makes_a_device_stale(recorded):
    refresh(recorded)
    text = (recorded / STANDARD).read_text()
    (recorded / STANDARD).write_text(text.replace('"/dev/nvidia7"', '"/dev/nvidia77"'))
    seen = states(recorded)
    stale = {name for (_, name), state in seen.items() if state == "stale"}
    assert {name for name in stale if not name.startswith("nvidia.com/gpu=GPU-")} == {
        "nvidia.com/gpu=7", "nvidia.com/gpu=all",
    }  # fmt: skip


def test_missing_hook_program_makes_every_device_stale_until_the_refresh(recorded):
    refresh(recorded)
    hook = {"hookName": "createContainer", "path": "/usr/bin/gone-hook"}
    tree = yaml.safe_load((recorded / STANDARD).read_text())
    tree["containerEdits"]["hooks"] = [hook]
    (recorded / STANDARD).write_text(yaml.safe_dump(tree))
    assert set(states(recorded).values()) == {"stale"}
    assert actions(refresh(recorded)) == [("/" + STANDARD, "updated")]
    assert set(states(recorded).values()) == {"usable"}


def test_file_that_an_installed_engine_cannot_read_is_named(recorded):
    refresh(recorded)
    text = (recorded / STANDARD).read_text()
    (recorded / STANDARD).write_text(text.replace('cdiVersion: "0.5.0"', 'cdiVersion: "0.7.0"'))
    document = gpunode("cdi", "list", "--root", str(recorded), "-o", "json").document
    assert document["data"]["files"][0]["problem"] == "containerd 1.7.2 reads CDI up to 0.5.0, this is 0.7.0"


def test_empty_node_gets_a_hint(tmp_path):
    ran = gpunode("cdi", "list", "--root", str(tmp_path))
    assert (ran.code, "gpunode cdi refresh" in ran.out) == (0, True)


def test_malformed_device_id_is_refused_before_the_driver_is_queried(tmp_path):
    ran = gpunode("cdi", "generate", "--device-id", "foo", "--root", str(tmp_path))
    error = ran.err.splitlines()[0]
    assert (ran.code, error) == (2, "error: --device-id 'foo' is neither an index nor a UUID")


def test_missing_directory_in_the_option_is_an_error(tmp_path):
    ran = gpunode("cdi", "list", "--root", str(tmp_path), "--spec-dir", "/nope")
    assert (ran.code, ran.err.splitlines()[0]) == (2, "error: --spec-dir /nope: there is no such directory")
