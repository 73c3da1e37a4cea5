"""`driver install` on RHEL and its derivatives, where dnf and rpm are programs with the output of recorded
runs.

No dnf runs here: DNF and RPM below print what theirs print and store their arguments in files. gpunode's own
part is tested: the repository's file, the module's stream, planning again, and the rollback.
"""

from __future__ import annotations

import json

import pytest

from tests.packages.driver_node import LOG, MODULES, DriverNode
from tests.packages.test_apply_driver_apt import _cannot

REPO = "/etc/yum.repos.d/cuda-rhel9-x86_64.repo"
STREAM = "/etc/dnf/modules.d/nvidia-driver.module"
STATE = "/var/lib/recorded"
RPM = f"""\
#!/usr/bin/python3
import os, sys
names = os.listdir("{STATE}") if sys.argv[1] == "-qa" else sys.argv[4:]
names = [] if sys.argv[1].startswith("--") else sorted(set(names) - {{"fails", "stream-stays"}})
for name in names:
    path = "{STATE}/" + name
    there = os.path.exists(path)
    print(name + "\\t" + open(path).read() if there else "package " + name + " is not installed")
sys.exit(0 if names or sys.argv[1] == "-qa" else 1)
"""
DNF = f"""\
#!/usr/bin/python3
import os, sys
words = [word for word in sys.argv[1:] if word not in ("-y", "-q") and not word.startswith("--setopt")]
asks = words[0] == "repoquery" or words[:2] == ["versionlock", "list"]
open("{LOG}", "a").write("dnf " + " ".join(words) + "\\n") if not asks else None
enabled = os.path.exists("{STREAM}") and "580-open" in open("{STREAM}").read()
names = ("nvidia-driver-cuda", "kmod-nvidia-open-dkms", "nvidia-persistenced")
offers = dict.fromkeys(names, ("3:580.173.02-1.el9",))
if words[0] == "repoquery":
    for name in words[4:]:
        if name == "dkms":
            print("dkms 3.2.1-1.el9 epel")
        for version in offers.get(name, ()) if enabled and os.path.exists("{REPO}") else ():
            print(name, version, "cuda-rhel9-x86_64")
elif words[0] == "versionlock":
    sys.exit("No such command: versionlock" if os.path.exists("{STATE}/versionlock") else 0)
elif words[:2] == ["module", "enable"]:
    os.makedirs(os.path.dirname("{STREAM}"), exist_ok=True)
    stream = words[2].partition(":")[2]
    text = "[nvidia-driver]\\nname=nvidia-driver\\nstream=" + stream + "\\nstate=enabled\\n"
    open("{STREAM}", "w").write(text)
elif words[:2] == ["module", "reset"]:
    if os.path.exists("{STATE}/stream-stays"):
        sys.exit("Error: cannot write {STREAM}")
    os.remove("{STREAM}")
elif words[0] == "install":
    if os.path.exists("{STATE}/fails"):
        sys.exit("Error: Transaction test error:\\n  package needs 900MB more space on the / filesystem")
    for word in words[1:]:
        name = next(one for one in offers if word.startswith(one))
        open("{STATE}/" + name, "w").write(word[len(name) + 1:])
        for needed in ("nvidia-driver-cuda-libs", "gcc"):
            open("{STATE}/" + needed, "w").write("3:580.173.02-1.el9")
    open("{MODULES}/modules.dep", "a").write("extra/nvidia.ko.xz:\\n")
elif words[0] == "remove":
    for name in words[1:]:
        if os.path.exists("{STATE}/" + name):
            os.remove("{STATE}/" + name)
"""


@pytest.fixture
def rocky(tmp_path):
    if _cannot():
        pytest.skip(_cannot())
    node = DriverNode(tmp_path, None)
    if not node.ready:
        pytest.skip("needs overlayfs in a mount namespace")
    node.become_rocky({"dnf": DNF, "rpm": RPM})
    node.sh(f"mkdir -p {STATE}")
    yield node
    node.close()


def test_repository_and_stream_are_set_before_exact_versions(rocky):
    planned = json.loads(rocky.gpunode("driver", "plan", "-o", "json").out)["data"]
    assert not planned["resolved"] and planned["files"][0]["path"] == REPO
    ran = rocky.gpunode("driver", "install", "--yes", "-o", "json")
    assert ran.code == 0, ran.err
    assert "the repository has driver 580.173.02" in ran.err
    assert rocky.called() == [
        "dnf makecache --refresh",
        "dnf module enable nvidia-driver:580-open",
        "dnf install nvidia-driver-cuda-3:580.173.02-1.el9 kmod-nvidia-open-dkms-3:580.173.02-1.el9"
        " nvidia-persistenced-3:580.173.02-1.el9",
        "dracut -f --regenerate-all",
        "grubby --update-kernel=ALL --args=rd.driver.blacklist=nouveau modprobe.blacklist=nouveau",
        "modprobe nvidia",
        "modprobe nvidia-uvm",
        "systemctl enable --now nvidia-persistenced.service",
    ]
    assert "gpgcheck=1" in rocky.sh(f"cat {REPO}")
    undo = ran.document["data"]["undo"]
    assert undo[0].startswith("dnf -y --setopt=exit_on_lock=True remove --noautoremove ")
    assert {"kmod-nvidia-open-dkms", "nvidia-driver-cuda-libs"} <= set(undo[0].split())
    assert "gcc" not in undo[0] and undo[-1] == "dnf -y module reset nvidia-driver"
    again = rocky.gpunode("driver", "install", "--yes")
    assert again.code == 0 and "nothing to do" in again.out


def test_failure_resets_the_stream_and_removes_the_repository(rocky):
    rocky.sh(f"touch {STATE}/fails")
    ran = rocky.gpunode("driver", "install", "--yes")
    assert ran.code == 4 and "were restored" in ran.err
    assert "900MB more space" in ran.err and "hint: free disk space" in ran.err
    assert rocky.called()[-1] == "dnf module reset nvidia-driver"
    assert not rocky.exists(REPO) and not rocky.exists(STREAM)


def test_a_stream_that_cannot_be_reset_is_named_with_its_command(rocky):
    rocky.sh(f"touch {STATE}/fails {STATE}/stream-stays")
    ran = rocky.gpunode("driver", "install", "--yes")
    assert ran.code == 1 and "900MB more space" in ran.err, ran.err
    assert "rolled back, but dnf: Error: cannot write" in ran.err and not rocky.exists(REPO)
    assert "hint: run it again: dnf -y module reset nvidia-driver" in ran.err


def test_unsupported_hold_is_reported_before_any_change(rocky):
    rocky.write(f"{STATE}/versionlock", "no")
    ran = rocky.gpunode("driver", "install", "--yes", "--hold")
    assert ran.code == 3 and "versionlock plugin" in ran.err and "hint: " in ran.err
    assert rocky.called() == [] and not rocky.exists(REPO)


def test_dependencies_are_removed_if_the_manager_reports_no_plan(rocky):
    rocky.fake("dracut", 1)
    ran = rocky.gpunode("driver", "install", "--yes")
    assert ran.code == 1, ran.err
    assert rocky.sh(f"ls {STATE}").split() == ["gcc"], "a compiler may belong to any program"
    assert "other packages are not as before: gcc 3:580.173.02-1.el9 (new)" in ran.err
    assert "hint: dnf -y --setopt=exit_on_lock=True remove --noautoremove gcc" in ran.err
    assert not rocky.exists(REPO) and not rocky.exists(STREAM)
