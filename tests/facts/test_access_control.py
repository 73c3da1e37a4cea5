import pytest

from gpunode.facts import access_control, system
from gpunode.facts.kernel_log import KernelLine
from gpunode.host import Host

CONTAINER = "system_u:system_r:container_t:s0:c380,c597"
GPU = "system_u:object_r:xserver_misc_device_t:s0"


def avc(**change):
    fields = {
        "perm": "read write",
        "name": "nvidiactl",
        "scontext": CONTAINER,
        "tcontext": GPU,
        "comm": "python3",
    }
    fields |= {"permissive": "0"} | change
    return (
        "type=AVC msg=audit(1768086000.146:3512): avc:  denied  {{ {perm} }} for  pid=41822 "
        'comm="{comm}" name="{name}" dev="devtmpfs" ino=981 scontext={scontext} tcontext={tcontext} '
        "tclass=chr_file permissive={permissive}"
    ).format(**fields)


def denials(tmp_path, *lines, log=()):
    place = tmp_path / "var/log/audit"
    place.mkdir(parents=True)
    (place / "audit.log").write_text("\n".join(lines) + "\n")
    return access_control.selinux_denials(Host(tmp_path), tuple(KernelLine(0.0, text) for text in log))


def test_denial_of_a_container_has_its_time_and_file(tmp_path):
    (found,) = denials(tmp_path, avc())
    assert (found.source, found.when, found.subject) == (access_control.AUDIT_LOG, 1768086000.0, CONTAINER)


@pytest.mark.parametrize(
    "change",
    [
        {"permissive": "1"},
        {"perm": "getattr"},
        {"scontext": "system_u:system_r:xdm_t:s0-s0:c0.c1023"},
        {"comm": "nvidia-smi", "name": "config.json", "tcontext": "system_u:object_r:admin_home_t:s0"},
    ],
)
def test_denials_unrelated_to_gpus_in_containers_are_left_out(tmp_path, change):
    assert denials(tmp_path, avc(**change)) == ()


def test_library_is_recognized_by_its_path(tmp_path):
    library = avc(tcontext="system_u:object_r:default_t:s0").replace(
        'name="nvidiactl"', 'path="/opt/libnvidia-ml.so.1"'
    )
    assert len(denials(tmp_path, library)) == 1


def test_kernel_log_is_read_if_auditd_does_not_run(tmp_path):
    (found,) = denials(tmp_path, log=(avc().replace("type=AVC msg=", "audit: type=1400 "),))
    assert (found.source, found.when) == ("dmesg", 1768086000.0)


def test_garbage_is_not_a_denial(tmp_path):
    assert denials(tmp_path, "avc: denied", "avc:  denied  { } for", "\0\xff{", avc()[:90]) == ()


def test_booleans_are_on_off_or_unknown(tmp_path):
    place = tmp_path / "sys/fs/selinux/booleans"
    place.mkdir(parents=True)
    (place / "on").write_text("1 1")
    (place / "waits").write_text("0 1")
    host = Host(tmp_path)
    assert [access_control.selinux_boolean(host, name) for name in ("on", "waits", "none")] == [
        True,
        False,
        None,
    ]
    assert not access_control.selinux_enforcing(host)


def test_only_container_profiles_are_read_for_apparmor():
    text = 'audit: type=1400 audit(1.2:3): apparmor="DENIED" operation="open" profile="{}" name="{}" pid=1'
    lines = [
        KernelLine(0.0, text.format(profile, name))
        for profile, name in (
            ("firefox", "/dev/nvidiactl"),
            ("docker-default", "/etc/shadow"),
            ("lxc-100_</var/lib/lxc>", "/dev/nvidia-uvm"),
        )
    ]
    assert [one.subject for one in access_control.apparmor_denials(tuple(lines))] == [
        "lxc-100_</var/lib/lxc>"
    ]


@pytest.mark.parametrize(
    ("text", "unprivileged"),
    [("0 0 4294967295", False), ("0 100000 65536", True), ("", None), ("garbage", None)],
)
def test_unprivileged_container_maps_root_to_another_user(tmp_path, text, unprivileged):
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/uid_map").write_text(text)
    assert system.unprivileged(Host(tmp_path)) is unprivileged
