"""Only the commands named in a command line are built; apart from the time it makes no difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.machines import recorded_host
from tests.cli import gpunode


def test_directory_named_like_a_command_is_accepted(tmp_path: Path) -> None:
    root = tmp_path / "gpus"
    root.mkdir()
    ran = gpunode("--root", str(root), "-o", "json", "doctor", "--only", "pci-no-gpu")
    assert ran.document["kind"] == "DoctorReport"


def test_value_named_like_a_command_is_accepted() -> None:
    ran = gpunode("-o", "json", "explain", "doctor")
    assert ran.code == 2
    assert ran.document["kind"] == "CheckExplanation"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv: list[str]) -> None:
    ran = gpunode(*argv)
    for name in ("doctor", "configure-runtime", "rollback", "plugin", "toolkit", "gpus"):
        assert f"\n  {name}" in ran.out + ran.err


def test_unknown_command_before_a_known_one_is_a_usage_error() -> None:
    ran = gpunode("doktor", "doctor")
    assert (ran.code, ran.out) == (2, "")
    assert "no such command" in ran.err.lower() and "Traceback" not in ran.err


def test_group_without_subcommand_lists_its_commands() -> None:
    ran = gpunode("toolkit", "config")
    assert ran.code == 2
    assert all(f"\n  {name}" in ran.err for name in ("get", "set", "unset"))


@pytest.mark.parametrize("group", ["", "cdi", "journal", "manifests", "plugin", "status", "toolkit"])
def test_no_summary_in_a_list_of_commands_is_truncated(group: str) -> None:
    ran = gpunode(*filter(None, [group]), "--help")
    assert ran.code == 0
    commands = ran.out.partition("Commands:" if group else "Diagnose:")[2].partition("ptions:")[0]
    assert commands and "..." not in commands


@pytest.mark.parametrize("name", ["--runtime-path", "--nvidia-runtime-path"])
def test_option_names_of_nvidia_ctk_are_accepted(name: str, tmp_path: Path) -> None:
    recorded_host("containerd-not-restarted", tmp_path)
    options = ("--nvidia-set-as-default", name, "/opt/nvidia-container-runtime", "--dry-run")
    ran = gpunode("--root", str(tmp_path), "configure-runtime", "--runtime", "docker", *options)
    assert ran.code == 3, ran.err  # that program isn't on this node, so a real run would refuse
    assert '+            "path": "/opt/nvidia-container-runtime"' in ran.out
    assert '"default-runtime": "nvidia"' in ran.out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cri-o", "did you mean crio?"),
        ("containred", "did you mean containerd?"),
        ("lxc", "known: docker, containerd, crio, podman, k3s, rke2, k0s, microk8s, auto"),
    ],
)
def test_unknown_engine_suggests_the_intended_one(name: str, hint: str, tmp_path: Path) -> None:
    ran = gpunode("--root", str(tmp_path), "configure-runtime", "--runtime", name)
    assert ran.code == 2
    assert ran.err.splitlines() == [f"error: unknown runtime {name!r}", f"hint: {hint}"]


def test_engines_are_named_with_commas_or_by_repeating_the_option(tmp_path: Path) -> None:
    recorded_host("containerd-not-restarted", tmp_path)
    configure = ("--root", str(tmp_path), "configure-runtime", "--dry-run", "--no-restart")
    listed = gpunode(*configure, "--runtime", "docker,containerd")
    repeated = gpunode(*configure, "--runtime", "docker", "--runtime", "containerd")
    assert listed == repeated and "docker" in listed.out and "containerd" in listed.out, listed.err


def test_engine_not_installed_here_lists_the_installed_ones(tmp_path: Path) -> None:
    recorded_host("containerd-not-restarted", tmp_path)
    ran = gpunode("--root", str(tmp_path), "configure-runtime", "--runtime", "k3s")
    assert (ran.code, ran.err.splitlines()) == (
        3,
        [
            "error: k3s is not installed on this node",
            "hint: install it first, or name an installed engine: --runtime docker or --runtime containerd",
        ],
    )


def test_missing_variant_is_not_fixed_by_the_path_of_the_main_program(tmp_path: Path) -> None:
    recorded_host("containerd-not-restarted", tmp_path)
    options = ("--runtime", "docker", "--also", "cdi", "--dry-run")
    ran = gpunode("--root", str(tmp_path), "configure-runtime", *options)
    assert ran.code == 3
    assert "nvidia-container-runtime.cdi is not there" in ran.err
    assert "or leave out --also" in ran.err and "--nvidia-runtime-path" not in ran.err
