"""Three booted nodes that Ansible configures through ssh, as a user who may use sudo."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fixtures.debian_base import base
from fixtures.driver_tree import write_files
from tests.ansible.controller import Controller
from tests.cli import Ran
from tests.machine.booted import Machine
from tests.machine.network import Network

NAMES = ("node1", "node2", "node3")
FIRST = 2
"""The last part of the address of the first node."""
PLAY_SECONDS = 600.0
_RECAP = re.compile(r"^(\w+) +: (ok=.*)$", re.MULTILINE)


@dataclass
class Fleet:
    """The nodes by name, the network that connects them, and the controller."""

    machines: Mapping[str, Machine]
    network: Network
    controller: Controller
    inventory: Path

    def play(self, book: str, *options: str, **variables: Any) -> Ran:
        """One run of a playbook of the collection."""
        words = ("-i", str(self.inventory), "-e", json.dumps(variables), *options, f"gpunode.node.{book}")
        return self.controller.run("ansible-playbook", *words, timeout=PLAY_SECONDS)

    def cut(self, name: str) -> None:
        """Unplug a node's network cable."""
        self.network.cut(name)

    def play_with_reboot(self, name: str, booting: Callable[[], None], **variables: Any) -> Ran:
        """A run of the playbook rolling for one node, which reboots in it. This function is the firmware that
        starts the node again. `booting` is called when the node has shut down."""
        machine = self.machines[name]
        new_boot_id(machine)
        # the machine is started by this thread: it would end with any other
        with ThreadPoolExecutor(1) as pool:
            play = pool.submit(self.play, "rolling", "--limit", name, **variables)
            machine.wait(lambda: play.done() or machine.is_restarting(), machine.console, PLAY_SECONDS)
            if not play.done():
                booting()
                machine.kill()
                machine.boot()
                new_boot_id(machine)
                self.network.join(machine, name, NAMES.index(name) + FIRST)
            return play.result()


def new_boot_id(machine: Machine) -> None:
    """Give a machine that has booted an identifier of this boot, which is otherwise that of its host."""
    machine.sh("cat /proc/sys/kernel/random/uuid > /run/boot-id")
    machine.sh("mount --bind /run/boot-id /proc/sys/kernel/random/boot_id")


def recap(done: Ran) -> dict[str, dict[str, int]]:
    """The last lines of a run: by host, how many tasks were ok, changed, failed..."""
    counts = {}
    for name, words in _RECAP.findall(done.out):
        counts[name] = {key: int(number) for key, number in (word.split("=") for word in words.split())}
    return counts


def changes(done: Ran) -> dict[str, int]:
    """By host, how many tasks changed something."""
    return {name: counts["changed"] for name, counts in recap(done).items()}


@contextmanager
def booted_fleet(suite: str, place: Path) -> Iterator[Fleet]:
    """Boot the nodes, with a driver and engines, and without gpunode."""
    common = Machine(suite, (base(suite),), place / "common")
    common.prepare()
    user = _key(place / "user")
    known: list[str] = []
    hosts: dict[str, dict[str, str]] = {}
    machines: dict[str, Machine] = {}
    with ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        for number, name in enumerate(NAMES, start=FIRST):
            machine = Machine(suite, (common.upper, *common.layers), place / name, hostname=name)
            stack.callback(machine.kill)
            host = _key(place / f"{name}-key")
            write_files(
                {
                    machine.upper / "etc/hostname": f"{name}\n",
                    machine.upper / "etc/hosts": f"127.0.0.1 localhost {name}\n",
                    machine.upper / "etc/sudoers.d/ada": "ada ALL=(ALL) NOPASSWD: ALL\n",
                    machine.upper / "etc/ssh/ssh_host_ed25519_key": host.read_text(),
                    machine.upper / "etc/ssh/ssh_host_ed25519_key.pub": _public(host),
                }
            )
            (machine.upper / "etc/ssh/ssh_host_ed25519_key").chmod(0o600)
            machine.boot()
            for login in ("ada", "ben"):
                machine.sh(f"useradd --create-home --shell /bin/bash {login}")
                machine.write(f"/home/{login}/.ssh/authorized_keys", _public(user))
            address = network.join(machine, name, number)
            known.append(f"{address} {_public(host)}")
            hosts[name] = {"ansible_host": address}
            machines[name] = machine
        (place / "known_hosts").write_text("".join(known))
        checked = f"-o UserKnownHostsFile={place / 'known_hosts'} -o StrictHostKeyChecking=yes"
        reached = {
            "ansible_user": "ada",
            "ansible_ssh_private_key_file": str(user),
            "ansible_ssh_common_args": f"-F none {checked} -o IdentitiesOnly=yes",
            "ansible_ssh_pipelining": True,
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        inventory = place / "inventory.json"
        inventory.write_text(json.dumps({"gpus": {"hosts": hosts, "vars": reached}}))
        yield Fleet(machines, network, Controller(place / "controller", network.inside()), inventory)


def _key(path: Path) -> Path:
    generate = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path)
    subprocess.run(generate, check=True, stdin=subprocess.DEVNULL)
    return path


def _public(key: Path) -> str:
    return key.with_suffix(".pub").read_text()
