"""What a container gets whichever device it asks for: control nodes, libraries, programs, hooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpunode.cdi.driver_files import DriverFiles
from gpunode.cdi.hooks import HookProgram, hooks_for
from gpunode.cdi.model import SOCKET, Edits, Mount, NodeEdit
from gpunode.cdi.nodes import CONTROL, NodeFacts, open_to_group_only
from gpunode.dataclass import replace
from gpunode.host import DeviceNode


def common_edits(
    nodes: NodeFacts, files: DriverFiles, hooks: HookProgram | None, *, groups: bool = False
) -> Edits:
    """With `hooks` NVIDIA's own do the container's links and cache; without, the mounts do."""
    present = [nodes.present[path] for path in CONTROL if path in nodes.present]
    control = device_edits(present, nodes.dev_root, groups=groups)
    # keeps NVIDIA's own runtime, where it is the default, from injecting the GPUs once more
    void = "NVIDIA_VISIBLE_DEVICES=void"
    if hooks is None:
        return replace(control, env=(void,), mounts=_mounts(files, _by_soname(files)))
    folders = tuple(dict.fromkeys(library.directory for library in files.libraries))
    env = (void, f"NVIDIA_CTK_LIBCUDA_DIR={':'.join(folders)}")
    mounts = _mounts(files, (Mount(one.path, f"{files.root}{one.path}") for one in files.libraries))
    return replace(control, env=env, mounts=mounts, hooks=hooks_for(hooks, files, folders))


def _by_soname(files: DriverFiles) -> Iterator[Mount]:
    """Each library at each of its names, in both places where a loader looks by itself.

    Without a hook nobody runs ldconfig in the container. That leaves what ld.so searches without a cache
    (ld.so(8)): Debian's is built for /usr/lib/<machine>-linux-gnu, everybody else's for /usr/lib64, glibc's
    own default; where an image has a symlink there, as Arch to /usr/lib, the engine follows it inside the
    image. The image isn't known when this is written, so both directories get all names, and one of them
    holds files that nobody opens. A name that the image has itself, as a file or as a link to one, is covered
    by the mount: the host's driver is what fits the host's kernel.

    Not done: LD_LIBRARY_PATH would replace the image's own and is ignored for privileged programs; an
    /etc/ld.so.cache or /etc/ld.so.conf.d of ours would hide the image's libraries. 32-bit libraries are left
    out: their directory is /usr/lib on RHEL, which is the 64-bit one on Arch, and would break that.
    """
    for library in files.libraries:
        for name in (library.name, *library.links):
            for directory in (f"/usr/lib/{files.architecture}-linux-gnu", "/usr/lib64"):
                yield Mount(f"{directory}/{name}", f"{files.root}{library.path}")


def _mounts(files: DriverFiles, libraries: Iterable[Mount]) -> tuple[Mount, ...]:
    """Sorted by depth, so that nothing is mounted below what comes later."""
    fixed = (Mount(inside, f"{files.root}{real}") for inside, real in files.files)
    sockets = (Mount(path, place, SOCKET) for path, place in files.sockets)
    unique = {mount.container_path: mount for mount in (*sockets, *fixed, *libraries)}
    return tuple(unique[path] for path in sorted(unique, key=natural))


def device_edits(devices: Iterable[DeviceNode], dev_root: str, *, groups: bool = False) -> Edits:
    """Device files in order, with their place on the node where that is below another root.

    With `groups` files keep their group, and the container's processes join one that has a file to itself, as
    nvidia-ctk writes it; without, an engine here doesn't know additionalGids. Such a file is open to every
    process of the container in both cases: Docker 28.5 forgets the groups of a container with ``--user``, and
    engines up to CDI library 1.0 open every device file.
    """
    by_path = {device.path: device for device in devices}
    nodes, gids = [], set()
    for path in sorted(by_path, key=natural):
        device = by_path[path]
        host_path = f"{dev_root}{path}" if dev_root else ""
        grouped = open_to_group_only(device)
        mode = device.mode | 0o666 if grouped else device.mode
        nodes.append(NodeEdit(path, host_path, mode, device.gid if groups else 0))
        gids |= {device.gid} if grouped and groups else set()
    return Edits(nodes=tuple(nodes), gids=tuple(sorted(gids)))


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by directory, then text, then numbers as numbers: nvidia2 comes before nvidia10."""
    parts = re.findall(r"\d+|[^\d/]+|/", path)
    keys = ((1, int(part), "") if part.isdigit() else (2, 0, part) for part in parts)
    return ((0, path.count("/"), ""), *keys)
