"""modprobe.d and the kernel's command line, as kmod reads them."""

from gpunode.facts.kernel_modules import kernel_arguments, parse_modprobe, read_module_options
from gpunode.host import Host
from tests.files import write


def machine(tmp_path, files):
    for name, text in files.items():
        write(tmp_path, name, text)
    return read_module_options(Host(tmp_path, environ={}))


def test_lines_are_joined_counted_and_unknown_ones_left_out():
    text = "# blacklist a\n\nblacklist nvidia-drm\noptions\tnvidia \\\n  A=1 B=2\nfoo bar\noptions\n"
    found = parse_modprobe(text, "x.conf")
    assert [(one.kind, one.module, one.value, one.line) for one in found] == [
        ("blacklist", "nvidia_drm", "", 3),
        ("options", "nvidia", "A=1 B=2", 4),
    ]


def test_file_hides_later_directories_and_names_give_the_order(tmp_path):
    found = machine(
        tmp_path,
        {
            "etc/modprobe.d/b.conf": "options nvidia NVreg_A=etc\n",
            "usr/lib/modprobe.d/b.conf": "options nvidia NVreg_A=hidden\nblacklist nouveau\n",
            "usr/lib/modprobe.d/c.conf": "options nvidia NVreg_A=late\n",
            "usr/lib/modprobe.d/c.conf.bak": "options nvidia NVreg_A=bak\n",
        },
    )
    option = found.option("nvidia", "NVreg_A")
    assert (option.value, option.source, option.line) == ("late", "/usr/lib/modprobe.d/c.conf", 1)
    assert found.refused("nouveau") == ()


def test_command_line_is_read_last_and_can_blacklist(tmp_path):
    line = "ro modprobe.blacklist=nouveau,nova-core rd.driver.blacklist=foo "
    line += 'nvidia.NVreg_A="1 2" iommu=pt -- x.y=z'
    found = machine(
        tmp_path, {"proc/cmdline": line + "\n", "etc/modprobe.d/a.conf": "options nvidia NVreg_A=0\n"}
    )
    assert found.option("nvidia", "NVreg_A").value == "1 2"
    assert found.refused("nouveau")[0].source == "/proc/cmdline" and found.refused("nova_core")
    assert not found.refused("foo") and found.refused_in_initramfs("foo")
    assert found.argument("iommu") == "pt" and found.argument("ro") == "" and found.argument("x.y") is None


def test_every_method_to_block_a_module_is_recognized(tmp_path):
    for number, line in enumerate(
        (
            "blacklist nouveau",
            "install nouveau /bin/false",
            "install nouveau /bin/true; echo no",
            "alias nouveau off",
            "options nouveau modeset=0",
        )
    ):
        assert machine(tmp_path / str(number), {"etc/modprobe.d/a.conf": line + "\n"}).refused("nouveau"), (
            line
        )
    for number, line in enumerate(
        (
            "install nouveau /sbin/modprobe --ignore-install nouveau",
            "options nouveau modeset=1",
            "#blacklist nouveau",
        )
    ):
        found = machine(tmp_path / f"not{number}", {"etc/modprobe.d/a.conf": line + "\n"})
        assert not found.refused("nouveau"), line


def test_empty_node_has_no_options(tmp_path):
    found = machine(tmp_path, {})
    assert found.directives == () and found.arguments == () and not found.refused("nouveau")
    assert kernel_arguments("") == ()


def test_directory_named_like_a_file_is_skipped(tmp_path):
    (tmp_path / "etc/modprobe.d/a.conf").mkdir(parents=True)
    assert machine(tmp_path, {"etc/modprobe.d/b.conf": "blacklist nouveau\n"}).refused("nouveau")
