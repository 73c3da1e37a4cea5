"""The last lines that the daemons logged in this boot, from systemd's journal."""

from __future__ import annotations

from gpunode.host import Host

UNITS = (
    *("docker", "containerd", "crio", "kubelet", "k3s", "k3s-agent", "rke2-server", "rke2-agent"),
    *("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-cdi-refresh", "nvidia-mig-manager"),
    *("gpunode-device-plugin", "gpunode-mps", "gpunode-cdi-refresh", "gpunode-doctor"),
)
_LINES = 500
_SECONDS = 5.0


def daemon_logs(host: Host) -> tuple[dict[str, str], dict[str, str]]:
    """Texts by unit, and for those without any why. One that hangs is the last that is asked."""
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    if not host.live:
        return found, missing
    for unit in UNITS:
        done = host.run(
            # --no-hostname: a log that is passed on needn't say on every line whose it is
            ("journalctl", "-u", unit, "-b", "-n", str(_LINES), "-q", "--no-pager", "--no-hostname"),
            timeout=_SECONDS,
        )
        if done.ok and done.stdout.strip():
            found[unit] = done.stdout
        elif done.timed_out:
            missing[unit] = f"journalctl gave no answer within {_SECONDS:g} s"
            break
        elif not done.ok:
            missing[unit] = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
            if done.code == 127:
                break
    return found, missing
