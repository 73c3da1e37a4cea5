"""The specifications behind the CDI names: contents, times of writing, and effects of a failure."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from threading import Event, Thread

import pytest

from gpunode.gpu.model import Inventory
from gpunode.plugin.background import BackgroundTask
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import ResourcePlan
from gpunode.plugin.nvidia.cdi import CHECK_SECONDS, CdiSpecs
from gpunode.plugin.nvidia.resources import plan
from gpunode.plugin.nvidia.response import answer
from tests.plugin.gpus import bare_host, cut, gpu, inventory, mig_uuid, snapshot, uuid
from tests.plugin.nodes import AtOnce, MemoryLog, eventually
from tests.waiting import PATIENCE

VERSION = "550.54.15"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
DIRECTORY = "/var/run/cdi"
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm")
BESIDE = (
    "/dev/gdrdrv",
    "/dev/nvidia-fs0",
    "/dev/nvidia-fs1",
    "/dev/infiniband/uverbs0",
    "/dev/infiniband/rdma_cm",
    "/dev/nvidia-caps-imex-channels/channel0",
)
CAPS = tuple(f"/dev/nvidia-caps/nvidia-cap{number}" for number in (11, 12, 21, 22))
MINORS = "gpu1/gi1/access 11\ngpu1/gi1/ci0/access 12\ngpu1/gi2/access 21\ngpu1/gi2/ci0/access 22\n"
CDI = Settings(device_list_strategy=("cdi-cri",))
CUT = inventory(gpu(0), cut(1, "1g.10gb", "1g.10gb"), gpu(2))
CTK = "/usr/bin/nvidia-ctk"
HELP = "COMMANDS:\n   create-symlinks  x\n   update-ldcache  x\n   enable-cuda-compat  x\n\nGLOBAL OPTIONS:\n"


def node(root, *, devices=(), libraries=LIBRARIES, files=None, commands=None):
    """A node of three GPUs with a driver; `devices` are more device files."""
    there = (*CONTROL, *(f"/dev/nvidia{index}" for index in range(3)), *CAPS, *devices)
    driver = {
        f"{libraries}/libcuda.so.{VERSION}": "x",
        f"{libraries}/libnvidia-ml.so.{VERSION}": "x",
        "/proc/driver/nvidia-caps/mig-minors": MINORS,
    }
    host = bare_host(root, there, {**driver, **(files or {})})
    if commands:
        path = root / ".gpunode/recording.json"
        tree = json.loads(path.read_text())
        path.write_text(json.dumps({**tree, "commands": commands}))
    return type(host)(root, {})


class Written:
    """One node with its specifications."""

    def __init__(self, host):
        self.host = host
        self.log = MemoryLog()
        self.specs = CdiSpecs(host, self.log, AtOnce())
        self.plan = ResourcePlan()

    def write(self, settings=CDI, given=CUT):
        self.plan = plan(self.host, settings, given)
        self.specs.write(settings, given, self.plan)
        return self

    def tree(self, device_class="gpu"):
        text = self.host.read_text(self.path(device_class))
        return None if text is None else json.loads(text)

    @staticmethod
    def path(device_class="gpu"):
        return f"{DIRECTORY}/k8s.device-plugin.nvidia.com-{device_class}.json"

    def names(self, device_class="gpu"):
        return [device["name"] for device in self.tree(device_class)["devices"]]

    def nodes(self, name, device_class="gpu"):
        (device,) = (one for one in self.tree(device_class)["devices"] if one["name"] == name)
        return [one["path"] for one in device["containerEdits"]["deviceNodes"]]

    def problems(self):
        found = {}
        for resource in self.plan.resources:
            for unit in resource.units:
                problem = self.specs.problem(resource, unit)
                if problem:
                    found[unit.index] = problem
        return found


# --- contents -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["none", "single", "mixed"])
@pytest.mark.parametrize("by", ["uuid", "index"])
def test_every_name_in_an_allocate_response_is_in_the_specification(tmp_path, strategy, by):
    settings = replace(CDI, mig_strategy=strategy, device_id_strategy=by)
    made = Written(node(tmp_path / "n")).write(settings)
    answered = {
        name.partition("=")[2]
        for resource in made.plan.resources
        for device in resource.devices
        for name in answer(settings, snapshot(resource), [device.id]).cdi
    }
    assert answered == set(made.names())
    assert made.problems() == {}
    assert made.tree()["kind"] == "k8s.device-plugin.nvidia.com/gpu"


def test_mixed_describes_whole_gpus_and_mig_devices(tmp_path):
    made = Written(node(tmp_path / "n")).write(replace(CDI, mig_strategy="mixed"))
    assert made.names() == [uuid(0), mig_uuid(1, 0), mig_uuid(1, 1), uuid(2)]
    assert made.nodes(uuid(2)) == ["/dev/nvidia2"]
    assert made.nodes(mig_uuid(1, 1)) == ["/dev/nvidia1", *CAPS[2:]]
    common = made.tree()["containerEdits"]
    assert [one["path"] for one in common["deviceNodes"]] == ["/dev/nvidia-uvm", "/dev/nvidiactl"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in common["env"]


def test_gpu_in_mig_mode_advertised_whole_resolves_with_all_its_parts(tmp_path):
    made = Written(node(tmp_path / "n")).write()
    assert made.names() == [uuid(0), uuid(1), uuid(2)]
    assert made.nodes(uuid(1)) == ["/dev/nvidia1", *CAPS]


def test_devices_that_are_not_advertised_are_not_described(tmp_path):
    made = Written(node(tmp_path / "n")).write(replace(CDI, exclude=("0",), mig_strategy="mixed"))
    assert made.names() == [mig_uuid(1, 0), mig_uuid(1, 1), uuid(2)]


def test_additional_classes_are_written_if_they_have_devices(tmp_path):
    settings = replace(CDI, imex_channel_ids=(0,), gdrcopy_enabled=True, gds_enabled=True, mofed_enabled=True)
    files = {"/etc/cufile.json": "{}"}
    made = Written(node(tmp_path / "n", devices=BESIDE, files=files)).write(settings)
    assert made.nodes("all", "gdrcopy") == ["/dev/gdrdrv"]
    assert made.nodes("all", "gds") == ["/dev/nvidia-fs0", "/dev/nvidia-fs1"]
    (mount,) = made.tree("gds")["devices"][0]["containerEdits"]["mounts"]
    assert mount["containerPath"] == "/etc/cufile.json"
    assert made.nodes("all", "mofed") == ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]
    assert made.nodes("0", "imex-channel") == ["/dev/nvidia-caps-imex-channels/channel0"]
    got = answer(settings, snapshot(made.plan.resources[0]), [uuid(0)])
    for name in got.cdi:
        kind, _, device = name.partition("=")
        assert device in made.names(kind.partition("/")[2])
    assert len(got.cdi) == 5


def test_feature_without_a_device_file_is_neither_written_nor_named(tmp_path):
    settings = replace(CDI, gdrcopy_enabled=True, imex_channel_ids=(0,))
    made = Written(node(tmp_path / "n")).write(settings)
    assert made.tree("gdrcopy") is None and made.tree("imex-channel") is None
    got = answer(settings, snapshot(made.plan.resources[0]), [uuid(0)])
    assert got.cdi == (f"k8s.device-plugin.nvidia.com/gpu={uuid(0)}",)


# --- hooks and roots ------------------------------------------------------------------------------------


def with_ctk(root, place=""):
    host = node(root, commands={f"{place}{CTK} hook --help": {"stdout": HELP}})
    program = root / f"{place}{CTK}".lstrip("/")
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("x")
    program.chmod(0o755)
    return host


def hooks(made):
    return [hook["args"][2] for hook in made.tree()["containerEdits"].get("hooks", [])]


def test_hooks_are_those_that_the_program_supports(tmp_path):
    made = Written(with_ctk(tmp_path / "n")).write()
    assert hooks(made) == ["create-symlinks", "enable-cuda-compat", "update-ldcache"]
    hook = made.tree()["containerEdits"]["hooks"][-1]
    assert (hook["path"], hook["args"][:3]) == (CTK, ["nvidia-ctk", "hook", "update-ldcache"])


def test_without_a_hook_program_only_mounts_are_written(tmp_path):
    made = Written(node(tmp_path / "n")).write()
    assert hooks(made) == []
    targets = [mount["containerPath"] for mount in made.tree()["containerEdits"]["mounts"]]
    assert f"/usr/lib64/libcuda.so.{VERSION}" in targets


@pytest.mark.parametrize(
    ("disabled", "remaining"),
    [(("all",), []), (("enable-cuda-compat",), ["create-symlinks", "update-ldcache"])],
)
def test_hooks_can_be_disabled(tmp_path, disabled, remaining):
    made = Written(with_ctk(tmp_path / "n")).write(replace(CDI, cdi_disable_hooks=disabled))
    assert hooks(made) == remaining


def test_paths_are_the_nodes_if_the_plugin_sees_them_through_a_mount(tmp_path):
    """The plugin in a container: the node's root is mounted at /driver-root."""
    host = bare_host(
        tmp_path / "n",
        tuple(f"/driver-root/dev/{name}" for name in ("nvidiactl", "nvidia0")),
        {
            f"/driver-root{LIBRARIES}/libcuda.so.{VERSION}": "x",
            "/driver-root/dev/placeholder": "",
        },
    )
    made = Written(host).write(given=inventory(gpu(0)))
    assert made.problems() == {}
    assert "driver-root" not in json.dumps(made.tree())
    assert made.nodes(uuid(0)) == ["/dev/nvidia0"]


def test_driver_container_is_described_below_its_root(tmp_path):
    root = "/run/nvidia/driver"
    devices = (f"{root}/dev/nvidiactl", f"{root}/dev/nvidia0")
    files = {f"{root}{LIBRARIES}/libcuda.so.{VERSION}": "x", f"{root}/dev/placeholder": ""}
    made = Written(bare_host(tmp_path / "n", devices, files))
    made.write(replace(CDI, driver_root=root), inventory(gpu(0)))
    (device,) = made.tree()["devices"]
    (edit,) = device["containerEdits"]["deviceNodes"]
    assert edit == {"path": "/dev/nvidia0", "hostPath": f"{root}/dev/nvidia0", "fileMode": 0o666}
    mount = made.tree()["containerEdits"]["mounts"][0]
    assert mount["hostPath"] == f"{root}{LIBRARIES}/libcuda.so.{VERSION}"


def test_persistence_socket_is_mounted_with_a_driver_root(tmp_path):
    """The driver root is mounted at /driver-root; the daemon runs with that driver."""
    root, socket = "/run/nvidia/driver", "/run/nvidia-persistenced/socket"
    files = {
        f"/driver-root{LIBRARIES}/libcuda.so.{VERSION}": "x",
        "/driver-root/dev/placeholder": "",
        f"/driver-root{socket}": "",
    }
    host = bare_host(tmp_path / "n", ("/driver-root/dev/nvidia0",), files)
    made = Written(host).write(replace(CDI, driver_root=root), inventory(gpu(0)))
    mounts = {mount["containerPath"]: mount for mount in made.tree()["containerEdits"]["mounts"]}
    assert mounts[socket]["hostPath"] == f"{root}{socket}"
    assert "noexec" in mounts[socket]["options"]


def test_invisible_hook_program_is_used_only_if_configured(tmp_path):
    """A separate driver root is mounted, so the node's /usr/bin is not visible."""
    root = "/run/nvidia/driver"
    files = {f"/driver-root{LIBRARIES}/libcuda.so.{VERSION}": "x", "/driver-root/dev/placeholder": ""}
    host = bare_host(tmp_path / "n", ("/driver-root/dev/nvidia0",), files)
    settings = replace(CDI, driver_root=root)
    made = Written(host).write(settings, inventory(gpu(0)))
    assert hooks(made) == []
    chosen = replace(settings, nvidia_cdi_hook_path="/opt/nvidia-cdi-hook")
    made.write(chosen, inventory(gpu(0)))
    hook = made.tree()["containerEdits"]["hooks"][-1]
    assert (hook["path"], hook["args"][0]) == ("/opt/nvidia-cdi-hook", "nvidia-cdi-hook")


# --- when they are written ------------------------------------------------------------------------------


def stamp(made):
    found = made.host.stat(made.path())
    return found.st_ino, found.st_mtime_ns


def test_equal_specification_is_not_rewritten_even_after_a_restart(tmp_path):
    made = Written(node(tmp_path / "n")).write()
    assert made.host.stat(made.path()).st_mode & 0o777 == 0o644
    before = stamp(made)
    made.write()
    made.specs.tick(1000.0)
    assert stamp(made) == before
    again = Written(made.host).write()
    assert stamp(again) == before
    assert again.log.messages() == []


def test_without_a_cdi_strategy_nothing_is_written(tmp_path):
    made = Written(node(tmp_path / "n")).write(Settings())
    assert not made.host.exists(DIRECTORY)


def test_new_layout_replaces_the_old_devices(tmp_path):
    mixed = replace(CDI, mig_strategy="mixed")
    made = Written(node(tmp_path / "n")).write(mixed)
    assert mig_uuid(1, 1) in made.names()
    made.write(mixed, inventory(gpu(0), cut(1, "1g.10gb"), gpu(2)))
    assert made.names() == [uuid(0), mig_uuid(1, 0), uuid(2)]


def test_new_driver_replaces_the_libraries(tmp_path):
    made = Written(node(tmp_path / "n", files={f"{LIBRARIES}/libcuda.so.560.1": "x"})).write()
    made.write(given=Inventory("560.1", "12.6", CUT.gpus))
    text = json.dumps(made.tree())
    assert "libcuda.so.560.1" in text and VERSION not in text


def test_removed_or_changed_file_is_rewritten(tmp_path):
    made = Written(node(tmp_path / "n")).write()
    right = made.tree()
    made.specs.tick(0.0)
    made.host.remove(made.path())
    made.specs.tick(CHECK_SECONDS - 1)
    assert made.tree() is None
    made.specs.tick(CHECK_SECONDS + 1)
    assert made.tree() == right
    made.host.write_atomic(made.path(), b"{}")
    made.specs.tick(3 * CHECK_SECONDS)
    assert made.tree() == right


def test_hook_program_installed_later_is_used(tmp_path):
    host = with_ctk(tmp_path / "n")
    place = tmp_path / f"n{CTK}"
    program = place.read_bytes()
    place.unlink()
    made = Written(host).write()
    assert hooks(made) == []
    place.write_bytes(program)
    place.chmod(0o755)
    made.specs.tick(1000.0)
    assert hooks(made) == ["create-symlinks", "enable-cuda-compat", "update-ldcache"]


@pytest.mark.parametrize("same", [True, False])
def test_symlink_in_the_directory_is_replaced_and_not_followed(tmp_path, same):
    made = Written(node(tmp_path / "n")).write()
    file, other = tmp_path / f"n{made.path()}", tmp_path / "n/etc/precious"
    right = file.read_bytes()
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(right if same else b"precious")
    before = other.read_bytes()
    file.unlink()
    file.symlink_to("/etc/precious")
    made.specs.tick(1000.0)
    assert not file.is_symlink()
    assert file.read_bytes() == right
    assert other.read_bytes() == before


def test_hanging_hook_program_does_not_block(tmp_path, monkeypatch):
    made = Written(node(tmp_path / "n")).write()
    made.host.remove(made.path())
    asked, answered = Event(), Event()

    def hang(settings, roots):
        asked.set()
        assert answered.wait(PATIENCE)

    task = BackgroundTask("cdi")
    made.specs = CdiSpecs(made.host, made.log, task)
    monkeypatch.setattr(made.specs, "_choose_hooks", hang)
    writing = Thread(target=made.write)  # as the planning thread does
    writing.start()
    assert asked.wait(PATIENCE)
    for now in (1000.0, 2000.0):  # the kubelet's thread
        made.specs.tick(now)
    assert made.tree() is None
    answered.set()
    writing.join(30)
    assert eventually(lambda: not task.busy)  # it has polled, too, and found nothing to do
    assert made.tree() is not None
    made.host.remove(made.path())
    answered.clear()
    asked.clear()
    made.specs.tick(3000.0)
    assert asked.wait(PATIENCE)
    assert made.tree() is None
    answered.set()
    assert eventually(lambda: made.tree() is not None)


def test_device_file_created_later_triggers_a_rewrite(tmp_path):
    """Engines keep a device's numbers until the file that names it changes."""
    made = Written(node(tmp_path / "n")).write()
    place = tmp_path / "n/dev/nvidia0"
    place.parent.mkdir(exist_ok=True)
    place.write_text("")
    os.utime(made.host.path(made.path()), (1, 1))
    before = stamp(made)
    made.specs.tick(1000.0)
    assert stamp(made) != before


def test_lost_gpu_stays_described_for_its_containers(tmp_path):
    made = Written(node(tmp_path / "n")).write()
    made.write(given=inventory(gpu(0, error="GPU is lost"), gpu(2)))
    assert made.names() == [uuid(0), uuid(2)]


# --- failures -------------------------------------------------------------------------------------------


def test_only_the_gpu_without_its_device_file_fails(tmp_path):
    host = bare_host(tmp_path / "n", (*CONTROL, "/dev/nvidia0"), {f"{LIBRARIES}/libcuda.so.{VERSION}": "x"})
    made = Written(host).write(given=inventory(gpu(0), gpu(1)))
    assert made.names() == [uuid(0)]
    problem = made.problems()["1"]
    assert problem.code == "cdi"
    assert "/dev/nvidia1 does not exist (nvidia-modprobe -c 1)" in problem.reason
    assert list(made.problems()) == ["1"]


def test_missing_driver_library_makes_every_device_unhealthy_until_it_exists(tmp_path):
    host = bare_host(tmp_path / "n", ("/dev/nvidia0",))
    made = Written(host).write(given=inventory(gpu(0), gpu(1)))
    assert set(made.problems()) == {"0", "1"}
    assert "libcuda.so.550.54.15" in made.problems()["0"].reason
    assert all(problem.logged and "(" not in problem.reason for problem in made.problems().values())
    (line,) = (fields for level, _, fields in made.log.lines if level == "error")
    assert line["indexes"] == "0,1"
    assert "--driver-root" in line["hint"]  # --library-path is cdi generate's
    first = made.problems()["0"]
    made.specs.tick(1000.0)
    assert made.problems()["0"] == first  # since is its beginning
    assert made.log.messages("error") == ["GPUs are unhealthy: no CDI specification can be written"]
    place = tmp_path / f"n{LIBRARIES}"
    place.mkdir(parents=True)
    (place / f"libcuda.so.{VERSION}").write_text("x")
    made.specs.tick(2000.0)
    assert set(made.problems()) == {"1"}


def test_unwritable_directory_makes_every_device_unhealthy(tmp_path):
    host = node(tmp_path / "n", files={"/var/run/cdi": "a file, not a directory"})
    made = Written(host).write()
    assert {problem.code for problem in made.problems().values()} == {"cdi"}
    assert len(made.problems()) == 3
    (tmp_path / "n/var/run/cdi").unlink()
    made.specs.tick(1000.0)
    assert made.problems() == {}
    assert len(made.names()) == 3


def test_old_mig_uuid_that_cdi_forbids_is_reported(tmp_path):
    old = cut(1, "1g.10gb")
    old = replace(old, mig=(replace(old.mig[0], uuid=f"MIG-{uuid(1)}/1/0"),))
    made = Written(node(tmp_path / "n")).write(replace(CDI, mig_strategy="mixed"), inventory(gpu(0), old))
    assert "device-id-strategy" in made.problems()["1:0"].reason
    assert "0" not in made.problems()


def test_disabling_cdi_ends_its_problems(tmp_path):
    made = Written(bare_host(tmp_path / "n")).write(given=inventory(gpu(0)))
    assert made.problems()
    made.write(Settings(), inventory(gpu(0)))
    assert made.problems() == {}
