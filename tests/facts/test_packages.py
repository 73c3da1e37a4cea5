from gpunode.facts.packages import RPM_QUERY, read_packages, upstream
from gpunode.host import Host

STATUS = """Package: libnvidia-compute-550
Status: install ok installed
Architecture: amd64
Source: nvidia-graphics-drivers-550
Version: 550.54.14-0ubuntu0.22.04.1
Description: NVIDIA libcompute package
 Package: not a field
 Version: 1

Package: nvidia-dkms-550
Status: hold ok installed
Version: 550.54.14-0ubuntu0.22.04.1

Package: nvidia-utils-535
Status: deinstall ok config-files
Version: 535.1
"""


def test_upstream_version_has_no_epoch_and_revision():
    assert upstream("3:550.90.07-1.el9") == "550.90.07"
    assert upstream("550.54.14-0ubuntu0.22.04.1") == "550.54.14"
    assert upstream("1.17.8-1") == "1.17.8"
    assert upstream("") == ""


def test_dpkg_lists_installed_and_held_packages(tmp_path):
    place = tmp_path / "var/lib/dpkg"
    place.mkdir(parents=True)
    (place / "status").write_text(STATUS)
    found = read_packages(Host(tmp_path, environ={}))
    assert found.manager == "dpkg"
    assert sorted(found.installed) == ["libnvidia-compute-550", "nvidia-dkms-550"]
    assert found.version("nvidia-utils-535", "libnvidia-compute-550") == "550.54.14"
    assert [one.held for one in found.starting("nvidia-", "libnvidia-")] == [False, True]
    assert [one.name for one in found.containing("dkms")] == ["nvidia-dkms-550"]


class Rpm(Host):
    def run(self, argv, **_):
        from gpunode.host.process import Completed

        assert tuple(argv) == RPM_QUERY
        text = "kernel-devel\t5.14.0-2.el9\t200\nkernel-devel\t5.14.0-1.el9\t100\nbroken\nx\t1-1\t?\n"
        return Completed(tuple(argv), 0, text, "")


def test_rpm_lists_the_installation_times(tmp_path):
    found = read_packages(Rpm(tmp_path, environ={}))
    assert found.manager == "rpm"
    assert found.installed["kernel-devel"].version == "5.14.0-2.el9"
    assert found.installed["kernel-devel"].installed_at == 200.0
    assert found.installed["x"].installed_at is None
    assert "broken" not in found.installed


def test_missing_database_gives_no_manager(tmp_path):
    assert read_packages(Host(tmp_path, environ={})).manager == ""
