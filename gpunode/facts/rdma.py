"""Network adapters for RDMA, and how much memory a process may pin for them."""

from __future__ import annotations

from gpunode.host import Host

_ADAPTERS = "/sys/class/infiniband"  # InfiniBand and RoCE alike


def rdma_adapters(host: Host) -> tuple[str, ...]:
    """Names such as mlx5_0."""
    return tuple(host.listdir(_ADAPTERS))


def locked_memory(host: Host, pid: int) -> int | None:
    """Bytes that a process may lock (proc_pid_limits(5)); -1 without limit, None if unknown."""
    for line in (host.read_text(f"/proc/{pid}/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0:1]
            if soft == ["unlimited"]:
                return -1
            return int(soft[0]) if soft and soft[0].isdecimal() and len(soft[0]) < 21 else None
    return None
