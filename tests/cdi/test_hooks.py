"""NVIDIA's hook program, which gained hooks with every release."""

import pytest

from gpunode.cdi.hooks import commands_in, find_hooks
from gpunode.commands.demo import build_machine
from gpunode.host import Host

HELP = """\
NAME:
   NVIDIA CDI Hook - Command to structure files for usage inside a container, called as hooks

USAGE:
   nvidia-cdi-hook [global options] command [command options]

VERSION:
   1.17.8

COMMANDS:
   update-ldcache      Update ldcache in a container by running ldconfig
   create-symlinks     A hook to create symlinks in the container.
   chmod               Set the permissions of folders in the container by running chmod.
   enable-cuda-compat  This hook ensures that the folder containing the CUDA compat libraries is added
   help, h             Shows a list of commands or help for one command

GLOBAL OPTIONS:
   --debug, -d    Enable debug-level logging (default: false) [$NVIDIA_CTK_DEBUG]
"""
OLD = "COMMANDS:\n   chmod  x\n   create-symlinks  x\n   update-ldcache  x\n\nOPTIONS:\n   --help  x\n"


def host(tmp_path, programs, commands):
    recorded = {argv: {"stdout": text} for argv, text in commands.items()}
    spec = {"executables": programs, "recording": {"commands": recorded}}
    return Host(build_machine(spec, tmp_path), environ={})


def test_hooks_are_parsed_from_the_help_text():
    assert commands_in(HELP) == {
        "update-ldcache",
        "create-symlinks",
        "chmod",
        "enable-cuda-compat",
        "help",
        "h",
    }
    assert commands_in("no such section") == frozenset()


def test_nvidia_cdi_hook_is_preferred_to_nvidia_ctk_hook(tmp_path):
    programs = ["/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook"]
    answers = {"/usr/bin/nvidia-cdi-hook --help": HELP, "/usr/bin/nvidia-ctk hook --help": OLD}
    found = find_hooks(host(tmp_path, programs, answers))
    assert found is not None
    assert (found.path, found.argv) == ("/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook",))
    assert "enable-cuda-compat" in found.known


def test_old_toolkit_has_the_hooks_in_nvidia_ctk(tmp_path):
    found = find_hooks(host(tmp_path, ["/usr/bin/nvidia-ctk"], {"/usr/bin/nvidia-ctk hook --help": OLD}))
    assert found is not None
    assert (found.path, found.argv) == ("/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook"))
    assert "enable-cuda-compat" not in found.known


@pytest.mark.parametrize("output", [None, "", "COMMANDS:\n   chmod  x\n"])
def test_hook_program_without_update_ldcache_is_not_used(output, tmp_path):
    answers = {} if output is None else {"/usr/bin/nvidia-cdi-hook --help": output}
    assert find_hooks(host(tmp_path, ["/usr/bin/nvidia-cdi-hook"], answers)) is None


def test_ldconfig_script_of_ubuntu_is_named_explicitly(tmp_path):
    programs = ["/usr/bin/nvidia-cdi-hook", "/sbin/ldconfig.real"]
    found = find_hooks(host(tmp_path, programs, {"/usr/bin/nvidia-cdi-hook --help": HELP}))
    assert found is not None and found.ldconfig == "/sbin/ldconfig.real"
