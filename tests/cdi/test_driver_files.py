"""Driver files in the layouts of all distributions."""

import pytest

from gpunode.cdi.driver_files import read_driver_files
from gpunode.commands.demo import build_machine
from gpunode.errors import PreconditionError
from gpunode.facts.libraries import CachedLibrary, build_ld_cache, find_library, linked_libraries
from gpunode.host import Host

VERSION = "550.54.15"
DEBIAN = "/usr/lib/x86_64-linux-gnu"


def node(tmp_path, files=(), links=None, **more):
    spec = {"files": dict.fromkeys(files, "x"), "links": links or {}, **more}
    return Host(build_machine(spec, tmp_path), environ={})


def libraries(found):
    return {library.path: library.links for library in found.libraries}


def test_plain_installation_lists_each_library_with_its_links(tmp_path):
    host = node(
        tmp_path,
        [
            f"/usr/lib64/libcuda.so.{VERSION}",
            f"/usr/lib64/libnvidia-glcore.so.{VERSION}",
            "/usr/lib64/libc.so.6",
        ],
        {"/usr/lib64/libcuda.so.1": f"libcuda.so.{VERSION}", "/usr/lib64/libcuda.so": "libcuda.so.1"},
    )
    assert libraries(read_driver_files(host, VERSION)) == {
        f"/usr/lib64/libcuda.so.{VERSION}": ("libcuda.so", "libcuda.so.1"),
        f"/usr/lib64/libnvidia-glcore.so.{VERSION}": (),
    }


def test_debian_alternatives_resolve_to_the_real_files(tmp_path):
    real = f"{DEBIAN}/nvidia/current"
    host = node(
        tmp_path,
        [f"{real}/libcuda.so.{VERSION}", f"{DEBIAN}/libnvidia-glcore.so.{VERSION}"],
        {
            f"{real}/libcuda.so.1": f"libcuda.so.{VERSION}",
            f"{DEBIAN}/libcuda.so.1": "/etc/alternatives/glx--libcuda.so.1",
            "/etc/alternatives/glx--libcuda.so.1": f"{real}/libcuda.so.1",
        },
    )
    assert libraries(read_driver_files(host, VERSION)) == {
        f"{real}/libcuda.so.{VERSION}": ("libcuda.so", "libcuda.so.1"),
        f"{DEBIAN}/libnvidia-glcore.so.{VERSION}": (),
    }


def test_loader_cache_adds_other_library_directories(tmp_path):
    cache = build_ld_cache((CachedLibrary("libcuda.so.1", "/opt/nvidia/lib/libcuda.so.1"),))
    host = node(
        tmp_path,
        [f"/opt/nvidia/lib/libcuda.so.{VERSION}"],
        {"/opt/nvidia/lib/libcuda.so.1": f"libcuda.so.{VERSION}"},
    )
    (tmp_path / "etc").mkdir(exist_ok=True)
    (tmp_path / "etc/ld.so.cache").write_bytes(cache)
    assert libraries(read_driver_files(host, VERSION)) == {
        f"/opt/nvidia/lib/libcuda.so.{VERSION}": ("libcuda.so", "libcuda.so.1")
    }


def test_leftovers_of_another_version_are_not_the_driver(tmp_path):
    host = node(
        tmp_path,
        [
            f"/usr/lib64/libcuda.so.{VERSION}",
            "/usr/lib64/libcuda.so.535.1",
            "/usr/lib64/libnvidia-ml.so.535.1",
        ],
        {"/usr/lib64/libnvidia-ml.so.1": "libnvidia-ml.so.535.1"},
    )
    assert list(libraries(read_driver_files(host, VERSION))) == [f"/usr/lib64/libcuda.so.{VERSION}"]


def test_without_libcuda_of_the_running_driver_generation_is_refused(tmp_path):
    host = node(tmp_path, ["/usr/lib64/libcuda.so.535.1"])
    with pytest.raises(PreconditionError, match=r"libcuda\.so\.550\.54\.15 of the running driver") as caught:
        read_driver_files(host, VERSION)
    assert "--library-path" in caught.value.hint


def test_modules_below_the_library_directory_keep_their_path(tmp_path):
    host = node(
        tmp_path,
        [
            f"{DEBIAN}/libcuda.so.{VERSION}",
            f"{DEBIAN}/libnvidia-allocator.so.{VERSION}",
            f"{DEBIAN}/libGLX_nvidia.so.{VERSION}",
            f"{DEBIAN}/libnvidia-egl-gbm.so.1.1.0",
            f"{DEBIAN}/vdpau/libvdpau_nvidia.so.{VERSION}",
        ],
        {
            f"{DEBIAN}/libnvidia-allocator.so.1": f"libnvidia-allocator.so.{VERSION}",
            f"{DEBIAN}/gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.1",
            f"{DEBIAN}/libGLX_indirect.so.0": f"libGLX_nvidia.so.{VERSION}",
        },
    )
    found = libraries(read_driver_files(host, VERSION))
    assert found[f"{DEBIAN}/libnvidia-allocator.so.{VERSION}"] == (
        "gbm/nvidia-drm_gbm.so",
        "libnvidia-allocator.so.1",
    )
    assert found[f"{DEBIAN}/libGLX_nvidia.so.{VERSION}"] == ("libGLX_indirect.so.0",)
    assert found[f"{DEBIAN}/vdpau/libvdpau_nvidia.so.{VERSION}"] == (f"vdpau/libvdpau_nvidia.so.{VERSION}",)
    assert f"{DEBIAN}/libnvidia-egl-gbm.so.1.1.0" in found


@pytest.mark.parametrize(
    ("library", "link"),
    [
        ("libcuda", "libcuda.so"),
        ("libGLX_nvidia", "libGLX_indirect.so.0"),
        ("libnvidia-opticalflow", "libnvidia-opticalflow.so"),
        ("libnvidia-allocator", "gbm/nvidia-drm_gbm.so"),
        ("libnvidia-vulkan-producer", "libnvidia-vulkan-producer.so"),
    ],
)
def test_container_gets_links_that_the_host_lacks(tmp_path, library, link):
    host = node(tmp_path, [f"{DEBIAN}/libcuda.so.{VERSION}", f"{DEBIAN}/{library}.so.{VERSION}"])
    found = libraries(read_driver_files(host, VERSION))
    assert found[f"{DEBIAN}/{library}.so.{VERSION}"] == (link,)


@pytest.mark.parametrize(
    "directory",
    ["/usr/lib/xorg/modules/extensions", f"{DEBIAN}/nvidia/xorg", "/usr/lib64/xorg/modules/updates/drivers"],
)
def test_glx_module_of_xorg_has_a_name_without_version(tmp_path, directory):
    real = f"{directory}/libglxserver_nvidia.so.{VERSION}"
    host = node(tmp_path, [f"{DEBIAN}/libcuda.so.{VERSION}", real, f"{directory}/nvidia_drv.so"])
    assert set(read_driver_files(host, VERSION).files) == {
        (real, real),
        (f"{directory}/libglxserver_nvidia.so", real),
        (f"{directory}/nvidia_drv.so", f"{directory}/nvidia_drv.so"),
    }


def test_programs_firmware_and_json_files_keep_their_host_path(tmp_path):
    firmware = f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
    icd = "/usr/share/vulkan/icd.d/nvidia_icd.json"
    host = node(
        tmp_path,
        [f"/usr/lib64/libcuda.so.{VERSION}", firmware, icd],
        {
            "/usr/bin/nvidia-smi": "/etc/alternatives/nvidia-smi",
            "/etc/alternatives/nvidia-smi": "/opt/nvidia-smi",
        },
        executables=["/opt/nvidia-smi"],
    )
    assert set(read_driver_files(host, VERSION).files) == {
        ("/usr/bin/nvidia-smi", "/opt/nvidia-smi"),
        (firmware, firmware),
        (icd, icd),
    }


def test_firmware_search_path_of_the_kernel_has_priority(tmp_path):
    custom = f"/srv/firmware/nvidia/{VERSION}/gsp_tu10x.bin"
    host = node(
        tmp_path,
        [f"/usr/lib64/libcuda.so.{VERSION}", custom, f"/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"],
    )
    place = tmp_path / "sys/module/firmware_class/parameters"
    place.mkdir(parents=True)
    (place / "path").write_text("/srv/firmware\n")
    assert read_driver_files(host, VERSION).files == ((custom, custom),)


def test_driver_root_is_resolved_from_inside(tmp_path):
    """A driver container's links are absolute and mean its own root."""
    root = "/run/nvidia/driver"
    host = node(
        tmp_path,
        [f"{root}/opt/lib/libcuda.so.{VERSION}", f"/usr/lib64/libcuda.so.{VERSION}"],
        {f"{root}/usr/lib64": "/opt/lib"},
    )
    found = read_driver_files(host, VERSION, root)
    assert (found.root, list(libraries(found))) == (root, [f"/opt/lib/libcuda.so.{VERSION}"])


def test_sockets_in_the_driver_root_take_precedence_over_the_hosts(tmp_path):
    """A driver container runs nvidia-persistenced itself; NVIDIA looks for its socket only there."""
    root, persistenced = "/run/nvidia/driver", "/run/nvidia-persistenced/socket"
    fabric = "/run/nvidia-fabricmanager/socket"
    libcuda = f"{root}/usr/lib64/libcuda.so.{VERSION}"
    host = node(tmp_path, [libcuda, f"{root}{persistenced}", persistenced, fabric])
    found = read_driver_files(host, VERSION, root)
    assert dict(found.sockets) == {persistenced: f"{root}{persistenced}", fabric: fabric}


def test_only_an_mps_directory_owned_by_root_is_mounted(tmp_path, monkeypatch):
    host = node(tmp_path, [f"/usr/lib64/libcuda.so.{VERSION}", "/run/nvidia-persistenced/socket"])
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/nvidia-mps").symlink_to("/etc")
    assert read_driver_files(host, VERSION).sockets == (("/run/nvidia-persistenced/socket",) * 2,)


def test_container_gets_the_library_that_the_host_loads(tmp_path):
    """If two directories have it, as after a .run installer, the doctor and the specification agree."""
    places = (DEBIAN, "/usr/lib64")
    host = node(
        tmp_path,
        [f"{place}/libcuda.so.{VERSION}" for place in places],
        {f"{place}/libcuda.so.1": f"libcuda.so.{VERSION}" for place in places},
    )
    found = find_library(host, "libcuda.so.1", linked_libraries(host))
    assert found is not None
    assert [one.path for one in read_driver_files(host, VERSION).libraries] == [found.real]
