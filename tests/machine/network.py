"""A network between booted machines: a namespace with a bridge, and a veth pair for each machine.

Nothing of it is visible outside; the kernel removes all of it when the last process in the namespace ends.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.machine.booted import Machine
from tests.waiting import eventually

_GATEWAY = "10.77.0.1"


class Network:
    """The namespace, in which the address 10.77.0.1 reaches every machine that has joined."""

    def __init__(self) -> None:
        # the process that keeps the namespace; it ends with the test run, however that ends
        holder = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity")
        self._holder = subprocess.Popen(holder, stdin=subprocess.DEVNULL)
        try:
            assert eventually(self._is_apart), "unshare made no network namespace"
            for words in (
                ("link", "set", "lo", "up"),
                ("link", "add", "bridge", "type", "bridge"),
                ("addr", "add", f"{_GATEWAY}/24", "dev", "bridge"),
                ("link", "set", "bridge", "up"),
            ):
                self._run("ip", *words)
        except BaseException:
            self.close()
            raise

    def _is_apart(self) -> bool:
        assert self._holder.poll() is None, "unshare --net failed"
        here, there = Path("/proc/self/ns/net"), Path(f"/proc/{self._holder.pid}/ns/net")
        program = Path(f"/proc/{self._holder.pid}/comm").read_text().strip()
        return program == "sleep" and here.readlink() != there.readlink()

    def inside(self, *argv: str) -> list[str]:
        """The command line that runs `argv` where the machines can be reached."""
        return ["nsenter", "--target", str(self._holder.pid), "--net", *argv]

    def _run(self, *argv: str) -> None:
        done = subprocess.run(self.inside(*argv), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"

    def join(self, machine: Machine, name: str, number: int) -> str:
        """Connect a machine that has booted, also again after a reboot, by a cable of that name. Returns the
        address, which ends in `number`."""
        address = f"10.77.0.{number}"
        peer = ("peer", "name", "eth0", "netns", str(machine.leader))
        self._run("ip", "link", "add", name, "type", "veth", *peer)
        self._run("ip", "link", "set", name, "master", "bridge", "up")
        machine.sh(f"ip addr add {address}/24 dev eth0; ip link set eth0 up")
        return address

    def cut(self, name: str) -> None:
        """Switch a cable off: packets to the machine are lost."""
        self._run("ip", "link", "set", name, "down")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
