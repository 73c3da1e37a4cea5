from gpunode.facts.packages import Package, Packages, apt_changes, brought, dnf_changes, zypp_changes
from gpunode.host import Host
from tests.files import write
from tests.required import required

APT = """
Start-Date: 2026-08-30  06:12:01
Commandline: /usr/bin/unattended-upgrade
Install: linux-image-6.8.0-88-generic:amd64 (6.8.0-88.90, automatic)
Upgrade: libnvidia-compute-580:amd64 (580.159.03-0ubuntu1, 580.173.02-0ubuntu1), bash:amd64 (5.1, 5.2)
End-Date: 2026-08-30  06:12:40
"""
ZYPP = """# 2026-08-30 06:12:01
2026-08-30 06:12:01|command|root@node|'zypper' 'up'|
2026-08-30 06:12:05|install|nvidia-compute-G06|580.173.02-lp156.1|x86_64|root@node|nvidia|0a1b|
"""
DNF = """2026-08-30T03:12:44+0000 SUBDEBUG Upgrade: nvidia-driver-cuda-libs-3:580.173.02-1.el9.x86_64
2026-08-30T03:12:45+0000 SUBDEBUG Upgraded: nvidia-driver-cuda-libs-3:580.159.03-1.el9.x86_64
2026-08-30T03:12:45+0000 INFO --- logging initialized ---
"""


def test_apt_history_names_package_version_line_and_command():
    found = [(one.package, one.version, one.line) for one in apt_changes(APT)]
    assert found == [
        ("linux-image-6.8.0-88-generic", "6.8.0-88.90", 4),
        ("libnvidia-compute-580", "580.173.02-0ubuntu1", 5),
        ("bash", "5.2", 5),
    ]


def test_log_of_each_manager_names_the_change_that_installed_a_version(tmp_path):
    for name, text in (("apt/history.log", APT), ("zypp/history", ZYPP), ("dnf.rpm.log", DNF)):
        root = tmp_path / name.replace("/", "-")
        write(root, f"var/log/{name}", text)
        found = required(brought(Host(root, environ={}), "580.173.02", Packages))
        assert "2026-08-30" in str(found) and "nvidia" in found.package and found.line
        assert brought(Host(root, environ={}), "580.159.03", Packages) is None
    assert [one.by for one in zypp_changes(ZYPP)] == ["zypper up"]
    assert [one.version for one in dnf_changes(DNF)] == ["3:580.173.02-1.el9"]


def test_without_a_log_the_rpm_install_time_is_used(tmp_path):
    installed = {"nvidia-driver": Package("nvidia-driver", "3:580.173.02-1.el9", installed_at=1756523564.0)}
    found = brought(Host(tmp_path, environ={}), "580.173.02", lambda: Packages("rpm", installed))
    assert str(found) == "2025-08-30 03:12 UTC nvidia-driver 3:580.173.02-1.el9"


def test_invalid_log_gives_no_changes():
    for parse in (apt_changes, zypp_changes, dnf_changes):
        assert list(parse("|||\n|install|\nUpgrade: \nInstall: (\n SUBDEBUG Upgrade: x\n")) == []
