from pathlib import Path

from gpunode.facts.packages import apt_pins, automatic_upgrades, parse_apt_conf
from gpunode.host import Host
from tests.files import write
from tests.required import required


def node(root: Path, files, programs=(), links=()):
    for name, text in files.items():
        write(root, name, text)
    for name in programs:
        write(root, name, "#!", 0o755)
    for name in links:
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to("/nowhere")
    return Host(root, environ={})


UBUNTU = """// Automatically upgrade
# a comment with "quotes";
Unattended-Upgrade::Allowed-Origins {
        "${distro_id}:${distro_codename}-security"; // https://example.com
//      "${distro_id}:${distro_codename}-updates";
};
Unattended-Upgrade {
  Package-Blacklist { "nvidia-"; "libnvidia-"; };
  Mail "root";
};
"""
ON = 'APT::Periodic::Update-Package-Lists "1";\nAPT::Periodic::Unattended-Upgrade "1";\n'
UU = ("usr/bin/unattended-upgrade",)


def test_both_apt_syntaxes_are_parsed():
    found = [(one.name, one.value, one.line) for one in parse_apt_conf(UBUNTU, "x")]
    assert found == [
        ("unattended-upgrade::allowed-origins", "${distro_id}:${distro_codename}-security", 4),
        ("unattended-upgrade::package-blacklist", "nvidia-", 8),
        ("unattended-upgrade::package-blacklist", "libnvidia-", 8),
        ("unattended-upgrade::mail", "root", 9),
    ]


def test_parsing_of_invalid_apt_settings_ends():
    assert next(parse_apt_conf('}}}{{{ "a" ; ; } "b', "x")).value == "a"


def test_unattended_upgrades_and_their_excluded_packages(tmp_path):
    files = {"etc/apt/apt.conf.d/20auto-upgrades": ON, "etc/apt/apt.conf.d/50unattended-upgrades": UBUNTU}
    found = required(automatic_upgrades(node(tmp_path, files, UU), "debian"))
    assert (found.tool, found.line) == ("unattended-upgrades", 2)
    assert found.leaves("nvidia-dkms-580") and found.leaves("libnvidia-compute-580")
    assert not found.leaves("linux-image-generic")


def test_disabled_or_missing_upgrades_are_not_reported(tmp_path):
    off = {"etc/apt/apt.conf.d/20auto": ON, "etc/apt/apt.conf.d/99off": 'APT::Periodic::Enable "0";'}
    assert automatic_upgrades(node(tmp_path / "a", off, UU), "debian") is None
    assert automatic_upgrades(node(tmp_path / "b", {"etc/apt/apt.conf.d/20auto": ON}), "debian") is None
    ignored = {"etc/apt/apt.conf.d/20auto.dpkg-old": ON}
    assert automatic_upgrades(node(tmp_path / "c", ignored, UU), "debian") is None


def test_version_pin_holds_a_package_and_a_repository_pin_does_not(tmp_path):
    text = "Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 600\n\n"
    text += "Package: libnvidia-* nvidia-open\nPin: version 580.*\nPin-Priority: 1000\n"
    host = node(
        tmp_path,
        {"etc/apt/preferences.d/nvidia": text, "etc/apt/apt.conf.d/20auto": ON},
        UU,
    )
    assert list(apt_pins(host)) == ["libnvidia-*", "nvidia-open"]
    found = required(automatic_upgrades(host, "debian"))
    assert found.leaves("libnvidia-compute") and found.leaves("nvidia-open")
    assert not found.leaves("nvidia-open-580")


def test_dnf_automatic(tmp_path):
    timer = ("etc/systemd/system/timers.target.wants/dnf-automatic.timer",)
    conf = {"etc/dnf/automatic.conf": "[commands]\nupgrade_type = default\napply_updates = yes\n"}
    found = required(automatic_upgrades(node(tmp_path / "a", conf, (), timer), "rhel"))
    assert (found.source, found.line) == ("/etc/dnf/automatic.conf", 3)
    assert not found.leaves("nvidia-driver")
    locked = conf | {"etc/dnf/plugins/versionlock.list": "# x\nnvidia-driver-3:580.159.03-1.el9.*\n"}
    assert required(automatic_upgrades(node(tmp_path / "b", locked, (), timer), "rhel")).leaves(
        "nvidia-driver"
    )
    entry = '[[packages]]\nname = "nvidia-driver"\n[[packages.conditions]]\nkey = "evr"\ncomparator = "="\n'
    by_dnf5 = conf | {"etc/dnf/versionlock.toml": f'version = "1.0"\n{entry}value = "3:580.159.03-1.fc43"\n'}
    found = required(automatic_upgrades(node(tmp_path / "g", by_dnf5, (), timer), "rhel"))
    assert (found.leaves("nvidia-driver"), found.leaves("kmod-nvidia-open")) == (True, False)
    excluded = conf | {"etc/dnf/dnf.conf": "[main]\nexcludepkgs=*nvidia*\n"}
    found = required(automatic_upgrades(node(tmp_path / "c", excluded, (), timer), "rhel"))
    assert found.leaves("kmod-nvidia-open")
    assert automatic_upgrades(node(tmp_path / "d", conf), "rhel") is None
    only = {"etc/dnf/automatic.conf": "upgrade_type = security\napply_updates = yes\n"}
    assert automatic_upgrades(node(tmp_path / "e", only, (), timer), "rhel") is None
    asks = {"etc/dnf/automatic.conf": "apply_updates = no\n"}
    assert automatic_upgrades(node(tmp_path / "f", asks, (), timer), "rhel") is None


def test_suse_online_update_and_locks(tmp_path):
    job = {"etc/cron.daily/opensuse.org-online_update": "#!/bin/sh\n"}
    assert not required(automatic_upgrades(node(tmp_path / "a", job), "suse")).leaves("nvidia-compute-G06")
    locked = job | {"etc/zypp/locks": "type: package\nmatch_type: glob\nsolvable_name: *nvidia*\n"}
    assert required(automatic_upgrades(node(tmp_path / "b", locked), "suse")).leaves("nvidia-compute-G06")
    assert automatic_upgrades(node(tmp_path / "c", {}), "suse") is None
    assert automatic_upgrades(node(tmp_path / "d", {}), "other") is None
