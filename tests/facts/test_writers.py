"""Files as NVIDIA's tools, gpunode and users write them, distinguished."""

from __future__ import annotations

from typing import Any

import pytest

from gpunode.facts.writers import (
    GPU_OPERATOR,
    NVIDIA_CTK,
    as_go_toml,
    generated_copy,
    nvidia_writer,
)
from gpunode.output.typed import toml

P2 = "io.containerd.grpc.v1.cri"
MAIN = f"""\
version = 2
# the site's own
[plugins."{P2}"]
sandbox_image = "registry.example/pause:3.9"
[plugins."{P2}".containerd]
default_runtime_name = "runc"
[plugins."{P2}".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."{P2}".cni]
bin_dir = "/opt/cni/bin"
"""
# output of nvidia-ctk for MAIN: the whole section, sorted, with every parent header
COPY = f"""version = 2

[plugins]

  [plugins."{P2}"]
    sandbox_image = "registry.example/pause:3.9"

    [plugins."{P2}".cni]
      bin_dir = "/opt/cni/bin"

    [plugins."{P2}".containerd]
      default_runtime_name = "runc"

      [plugins."{P2}".containerd.runtimes]

        [plugins."{P2}".containerd.runtimes.nvidia]
          runtime_type = "io.containerd.runc.v2"

          [plugins."{P2}".containerd.runtimes.nvidia.options]
            BinaryName = "/usr/bin/nvidia-container-runtime"

        [plugins."{P2}".containerd.runtimes.runc]
          runtime_type = "io.containerd.runc.v2"
"""
OURS = f"""\
# written by gpunode
version = 2
[plugins."{P2}".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins."{P2}".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
"""


def tree(text: str) -> dict[str, Any]:
    return toml(text)


def test_copy_of_the_section_is_recognized_and_agrees_at_first() -> None:
    found = generated_copy(tree(COPY), tree(MAIN), P2)
    assert found is not None
    assert (found.shadowed, found.lost) == ((), ())
    assert found.handlers == {"nvidia": "/usr/bin/nvidia-container-runtime"}
    assert (found.default, found.cdi) == ("", False)


def test_later_change_of_the_main_file_is_reported_as_shadowed() -> None:
    later = MAIN.replace("pause:3.9", "pause:3.10") + 'conf_dir = "/etc/cni/net.d"\n'
    found = generated_copy(tree(COPY), tree(later), P2)
    assert found is not None
    assert found.shadowed == (("sandbox_image",),)
    assert found.lost == (("cni", "conf_dir"),)


def test_change_requested_from_nvidia_ctk_is_not_drift() -> None:
    asked = COPY.replace('default_runtime_name = "runc"', 'default_runtime_name = "nvidia"').replace(
        "    sandbox_image", "    enable_cdi = true\n    sandbox_image"
    )
    found = generated_copy(tree(asked), tree(MAIN.replace("sandbox", "enable_cdi = false\nsandbox", 1)), P2)
    assert found is not None
    assert (found.shadowed, found.lost, found.default, found.cdi) == ((), (), "nvidia", True)


def test_disabled_cdi_in_a_copy_is_drift() -> None:
    copied = COPY.replace("    sandbox_image", "    enable_cdi = false\n    sandbox_image")
    main = MAIN.replace("sandbox_image", "enable_cdi = true\nsandbox_image", 1)
    found = generated_copy(tree(copied), tree(main), P2)
    assert found is not None and found.shadowed == (("enable_cdi",),)


def test_copy_of_the_daemon_dump_is_recognized_with_an_empty_main_file() -> None:
    found = generated_copy(tree(COPY), {"version": 2}, P2)
    assert found is not None and (found.shadowed, found.lost) == ((), ())


@pytest.mark.parametrize(
    "text",
    [
        OURS,
        "version = 2\n",
        COPY.replace("nvidia-container-runtime", "runsc"),
        COPY + '\n[plugins."io.containerd.internal.v1.opt"]\npath = "/opt"\n',
        OURS + f'[plugins."{P2}".registry]\nconfig_path = "/etc/containerd/certs.d"\n',
    ],
    ids=["minimal", "empty", "gvisor", "two-plugins", "own-registry"],
)
def test_other_drop_ins_are_not_copies(text: str) -> None:
    assert generated_copy(tree(text), tree(MAIN), P2) is None


def test_wrong_types_are_not_copies() -> None:
    broken: list[dict[str, Any]] = [
        {"plugins": 1},
        {"plugins": {P2: []}},
        {"plugins": {P2: {"containerd": 1}}},
    ]
    assert [generated_copy(wrong, tree(MAIN), P2) for wrong in broken] == [None] * 3
    found = [generated_copy(tree(COPY), wrong, P2) for wrong in broken]
    assert [one is not None for one in found] == [True, True, False]


def test_nvidia_ctk_is_recognized_by_its_format() -> None:
    assert as_go_toml(COPY)
    assert nvidia_writer(COPY, tree(COPY)) == NVIDIA_CTK
    assert nvidia_writer(OURS, tree(OURS)) == ""
    assert nvidia_writer(MAIN, tree(MAIN)) == ""
    edited = COPY.replace("[plugins]", "# edited\n[plugins]")
    assert nvidia_writer(edited, tree(edited)) == ""
    gvisor = COPY.replace("nvidia-container-runtime", "runsc")
    assert as_go_toml(gvisor) and nvidia_writer(gvisor, tree(gvisor)) == ""


def test_crio_and_docker_files_of_nvidia_ctk_are_recognized() -> None:
    crio = """
[crio]

  [crio.runtime]

    [crio.runtime.runtimes]

      [crio.runtime.runtimes.nvidia]
        runtime_path = "/usr/bin/nvidia-container-runtime"
        runtime_type = "oci"
"""
    assert nvidia_writer(crio, tree(crio)) == NVIDIA_CTK
    docker: dict[str, Any] = {"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}
    assert nvidia_writer('{\n    "runtimes": {}', docker) == NVIDIA_CTK
    docker["runtimes"]["nvidia"] = {"path": "nvidia-container-runtime", "runtimeArgs": []}
    assert nvidia_writer('{"runtimes": {}', docker) == ""


def test_operator_is_recognized_by_the_path_of_its_programs() -> None:
    text = COPY.replace("/usr/bin/", "/usr/local/nvidia/toolkit/")
    assert nvidia_writer(text, tree(text)) == GPU_OPERATOR


@pytest.mark.parametrize(
    "text",
    [
        "",
        'version = 2\n[plugins]\n  [plugins."x"]\n    a = 1\n',
        "b = 1\na = 2\n\n[x]\n  c = 1\n",
        "\n[x]\nc = 1\n",
        "\n[x.y]\n  c = 1\n",
    ],
    ids=["empty", "no-empty-lines", "unsorted", "no-indent", "no-header-on-the-way"],
)
def test_other_formatting_is_not_go_toml(text: str) -> None:
    assert not as_go_toml(text)
