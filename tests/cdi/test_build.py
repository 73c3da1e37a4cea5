"""From an inventory to a specification, without a machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.cdi.build import Form, build, natural
from gpunode.cdi.driver_files import Library
from gpunode.cdi.hooks import HookProgram
from gpunode.cdi.spec import as_tree, encode
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.host.reading import DeviceNode
from tests.cdi.nodes import DIRECTORY, VERSION, driver, facts, gpu, inventory, mig

HOOKS = HookProgram(
    "/usr/bin/nvidia-cdi-hook",
    ("nvidia-cdi-hook",),
    frozenset({"create-symlinks", "update-ldcache", "enable-cuda-compat"}),
)


def paths(spec, name):
    return [node.path for device in spec.devices if device.name == name for node in device.edits.nodes]


def test_gpu_is_named_by_index_and_uuid_and_has_the_node_of_its_minor_number():
    built = build(inventory(gpu(0, minor=7)), facts("/dev/nvidia7"), driver(), None, Form())
    assert [device.name for device in built.spec.devices] == ["0", "GPU-0", "all"]
    assert [paths(built.spec, name) for name in ("0", "GPU-0", "all")] == [["/dev/nvidia7"]] * 3
    assert built.notes == ()


def test_devices_and_nodes_are_ordered_by_number():
    gpus = [gpu(index) for index in range(12)]
    nodes = facts(*(f"/dev/nvidia{index}" for index in range(12)))
    spec = build(inventory(*gpus), nodes, driver(), None, Form()).spec
    assert [device.name for device in spec.devices][:12] == [str(index) for index in range(12)]
    assert paths(spec, "all") == [f"/dev/nvidia{index}" for index in range(12)]


def test_gpu_in_mig_mode_is_replaced_by_its_mig_devices():
    cut = gpu(0, minor=3, mig_enabled=True, mig=(mig(0, 1, gi=9), mig(0, 0, gi=2, ci=1)))
    caps = {
        "gpu3/gi9/access": 90,
        "gpu3/gi9/ci0/access": 91,
        "gpu3/gi2/access": 20,
        "gpu3/gi2/ci1/access": 22,
    }
    there = (f"/dev/nvidia-caps/nvidia-cap{number}" for number in (20, 22, 90, 91))
    spec = build(inventory(cut), facts("/dev/nvidia3", *there, caps=caps), driver(), None, Form()).spec
    assert [device.name for device in spec.devices] == ["0:0", "0:1", "MIG-0-0", "MIG-0-1", "all"]
    expected = ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap20", "/dev/nvidia-caps/nvidia-cap22"]
    assert paths(spec, "0:0") == paths(spec, "MIG-0-0") == expected


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"error": "Unknown Error"}, "GPU 1 is left out: Unknown Error"),
        ({"mig_enabled": True}, "GPU 1 is left out: MIG is on and holds no device"),
        ({"minor": 9}, "GPU 1 is left out: /dev/nvidia9 does not exist (nvidia-modprobe -c 9)"),
        (
            {"mig_enabled": True, "mig": (mig(1, 0, 4),)},
            "MIG device 1:0 is left out: /proc/driver/nvidia-caps/mig-minors doesn't have it",
        ),
    ],
)
def test_undescribable_gpu_does_not_hide_the_others(broken, reason):
    nodes = facts("/dev/nvidia0", "/dev/nvidia1")
    built = build(inventory(gpu(0), gpu(1, **broken)), nodes, driver(), None, Form())
    assert [device.name for device in built.spec.devices] == ["0", "GPU-0", "all"]
    assert built.notes == (reason,)


def test_mig_device_without_a_capability_device_file_is_left_out():
    cut = gpu(0, mig_enabled=True, mig=(mig(0, 0, 1), mig(0, 1, 2)))
    caps = {f"gpu0/gi{gi}/{part}access": 10 * gi + n for gi in (1, 2) for n, part in enumerate(("", "ci0/"))}
    nodes = facts("/dev/nvidia0", *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (10, 11, 20)), caps=caps)
    built = build(inventory(cut), nodes, driver(), None, Form())
    assert [device.name for device in built.spec.devices] == ["0:0", "MIG-0-0", "all"]
    assert built.notes == (
        "MIG device 0:1 is left out: /dev/nvidia-caps/nvidia-cap21 does not exist (run nvidia-smi)",
    )


def test_node_without_a_usable_gpu_has_no_specification():
    with pytest.raises(GpunodeError, match="NVML lists none"):
        build(inventory(), facts(), driver(), None, Form())
    with pytest.raises(GpunodeError, match="GPU 0 is left out: lost"):
        build(inventory(gpu(0, error="lost")), facts("/dev/nvidia0"), driver(), None, Form())


def test_minor_number_missing_in_nvml_is_read_from_the_driver():
    silent = gpu(0)
    silent = type(silent)(silent.index, silent.uuid, silent.name, silent.pci)
    nodes = facts("/dev/nvidia5", minors={silent.pci: 5})
    assert paths(build(inventory(silent), nodes, driver(), None, Form()).spec, "0") == ["/dev/nvidia5"]


RENDER = DeviceNode("/dev/dri/renderD128", 226, 128, 0o660, 105)


def with_render_node(limit):
    drm = {"0000:00:00.0": (RENDER.path,)}
    nodes = facts("/dev/nvidia0", drm=drm)
    nodes = nodes._replace(present={**nodes.present, RENDER.path: RENDER})
    return build(inventory(gpu(0)), nodes, driver(), None, Form(limit=limit)).spec


def test_node_group_is_joined_by_the_container_and_has_access():
    spec = with_render_node((0, 8, 0))
    edits = as_tree(spec)["devices"][0]["containerEdits"]
    assert edits["deviceNodes"] == [
        {"path": "/dev/nvidia0", "fileMode": 0o666},
        {"path": RENDER.path, "fileMode": 0o666, "gid": 105},
    ]
    assert edits["additionalGids"] == [105]
    assert spec.version == (0, 7, 0)
    assert "additionalGids" not in as_tree(spec)["containerEdits"]


def test_engine_without_group_support_opens_the_node_to_all_processes():
    spec = with_render_node((0, 6, 0))
    edits = as_tree(spec)["devices"][0]["containerEdits"]
    assert edits["deviceNodes"][1] == {"path": RENDER.path, "fileMode": 0o666}
    assert "additionalGids" not in edits
    assert spec.version == (0, 5, 0)


def test_gpu_brings_its_own_drm_nodes_and_a_mig_device_only_with_graphics():
    drm = {"0000:00:00.0": ("/dev/dri/card1", "/dev/dri/renderD128")}
    whole = build(
        inventory(gpu(0)), facts("/dev/nvidia0", *drm["0000:00:00.0"], drm=drm), driver(), None, Form()
    ).spec
    assert paths(whole, "0") == ["/dev/nvidia0", "/dev/dri/card1", "/dev/dri/renderD128"]
    slices = (mig(0, 0, 1), mig(0, 1, 2, profile="1g.10gb+gfx"))
    caps = {f"gpu0/gi{gi}/{part}access": 1 for gi in (1, 2) for part in ("", "ci0/")}
    nodes = facts("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1", *drm["0000:00:00.0"], caps=caps, drm=drm)
    cut = build(inventory(gpu(0, mig_enabled=True, mig=slices)), nodes, driver(), None, Form()).spec
    assert "/dev/dri/card1" not in paths(cut, "0:0")
    assert {"/dev/dri/card1", "/dev/dri/renderD128"} < set(paths(cut, "0:1"))


def test_without_hooks_library_links_are_in_the_loader_directories():
    spec = build(inventory(gpu(0)), facts("/dev/nvidia0"), driver(), None, Form()).spec
    mounted = {mount.container_path: mount.host_path for mount in spec.edits.mounts}
    real = f"{DIRECTORY}/libcuda.so.{VERSION}"
    for directory in (DIRECTORY, "/usr/lib64"):
        for name in ("libcuda.so", "libcuda.so.1", f"libcuda.so.{VERSION}"):
            assert mounted[f"{directory}/{name}"] == real
    assert spec.edits.hooks == ()


def test_mounts_do_not_replace_files_or_variables_of_the_image():
    """LD_LIBRARY_PATH and the loader's cache are the image's; /usr/lib is Arch's 64-bit directory."""
    spec = build(inventory(gpu(0)), facts("/dev/nvidia0"), driver(), None, Form()).spec
    assert spec.edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)
    parents = {mount.container_path.rpartition("/")[0] for mount in spec.edits.mounts}
    assert parents == {DIRECTORY, "/usr/lib64"}


def test_with_hooks_libraries_keep_their_path_and_only_known_hooks_run():
    vdpau = Library(
        f"{DIRECTORY}/vdpau/libvdpau_nvidia.so.{VERSION}", DIRECTORY, ("vdpau/libvdpau_nvidia.so.1",)
    )
    spec = build(inventory(gpu(0)), facts("/dev/nvidia0"), driver(vdpau), HOOKS, Form()).spec
    assert all(mount.container_path == mount.host_path for mount in spec.edits.mounts)
    assert [hook.args[1] for hook in spec.edits.hooks] == [
        "create-symlinks",
        "enable-cuda-compat",
        "update-ldcache",
    ]
    links = spec.edits.hooks[0].args[2:]
    assert f"libcuda.so.{VERSION}::{DIRECTORY}/libcuda.so.1" in links
    assert f"libvdpau_nvidia.so.{VERSION}::{DIRECTORY}/vdpau/libvdpau_nvidia.so.1" in links
    assert spec.edits.hooks[2].args == ("nvidia-cdi-hook", "update-ldcache", "--folder", DIRECTORY)


def test_hooks_create_the_udev_names_of_drm_nodes():
    drm = {
        f"0000:0{index}:00.0": (f"/dev/dri/card{index}", f"/dev/dri/renderD{128 + index}") for index in (0, 1)
    }
    there = [path for paths_ in drm.values() for path in paths_]
    nodes = facts("/dev/nvidia0", "/dev/nvidia1", *there, drm=drm)
    spec = build(inventory(gpu(0), gpu(1)), nodes, driver(), HOOKS, Form()).spec
    links = {device.name: device.edits.hooks[0].args[2:] for device in spec.devices}
    assert links["1"] == (
        "--link", "../card1::/dev/dri/by-path/pci-0000:01:00.0-card",
        "--link", "../renderD129::/dev/dri/by-path/pci-0000:01:00.0-render",
    )  # fmt: skip
    assert len(links["all"]) == 8
    assert build(inventory(gpu(0)), nodes, driver(), None, Form()).spec.devices[0].edits.hooks == ()


def test_driver_and_device_roots_appear_only_in_host_paths():
    files = driver(root="/run/nvidia/driver")
    spec = build(inventory(gpu(0)), facts("/dev/nvidia0", dev_root="/host"), files, None, Form()).spec
    assert {node.host_path for node in spec.devices[0].edits.nodes} == {"/host/dev/nvidia0"}
    assert all(mount.host_path.startswith("/run/nvidia/driver/usr") for mount in spec.edits.mounts)
    assert all(mount.container_path.startswith("/usr") for mount in spec.edits.mounts)


def test_device_name_that_cdi_forbids_is_left_out():
    """One such name, and an engine drops the whole file."""
    odd = type(gpu(0))(0, "MIG-GPU-1/7/0", "NVIDIA", "0000:00:00.0", 0)
    spec = build(inventory(odd), facts("/dev/nvidia0"), driver(), None, Form()).spec
    assert [device.name for device in spec.devices] == ["0", "all"]


def test_missing_control_nodes_are_reported_only_if_cuda_needs_them():
    nodes = facts("/dev/nvidia0", control=("/dev/nvidiactl",))
    (note,) = build(inventory(gpu(0)), nodes, driver(), None, Form()).notes
    assert note.startswith("/dev/nvidia-uvm does not exist and CUDA needs it: nvidia-modprobe -c0 -u")


def test_old_engine_gets_no_device_names_that_it_cannot_parse():
    built = build(inventory(gpu(0)), facts("/dev/nvidia0"), driver(), None, Form(limit=(0, 4, 0)))
    assert [device.name for device in built.spec.devices] == ["GPU-0", "all"]
    assert built.spec.version == (0, 3, 0)
    assert built.notes == ("an engine here reads CDI 0.4.0: devices can't be named by index",)


def test_specification_too_new_for_every_engine_is_refused():
    form = Form(device_class="gpu.shared", limit=(0, 5, 0))
    with pytest.raises(PreconditionError, match=r"needs CDI 0\.6\.0; an engine here reads 0\.5\.0"):
        build(inventory(gpu(0)), facts("/dev/nvidia0"), driver(), None, form)


@given(st.permutations(range(8)), st.integers(1, 8))
def test_same_node_gives_the_same_bytes_and_unique_names(order, count):
    gpus = inventory(*(gpu(index, minor=order[index]) for index in range(count)))
    nodes = facts(*(f"/dev/nvidia{minor}" for minor in order))
    specs = [build(gpus, nodes, driver(), None, Form()).spec for _ in range(2)]
    assert encode(specs[0], "yaml") == encode(specs[1], "yaml")
    names = [device["name"] for device in as_tree(specs[0])["devices"]]
    assert len(set(names)) == len(names) == 2 * count + 1


@given(st.lists(st.tuples(st.sampled_from(["/dev/nvidia", "/dev/dri/card", "/a/b/c"]), st.integers(0, 300))))
def test_paths_sort_by_depth_and_then_by_number(parts):
    found = sorted((f"{stem}{number}" for stem, number in parts), key=natural)
    assert [path.count("/") for path in found] == sorted(path.count("/") for path in found)
    numbers = [int(path.removeprefix("/dev/nvidia")) for path in found if path.startswith("/dev/nvidia")]
    assert numbers == sorted(numbers)
