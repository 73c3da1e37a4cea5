"""Changes to existing repositories of a node: found, repaired, disabled, never duplicated."""

import subprocess

import pytest

from gpunode.host import Host
from gpunode.packages.manager import FileChange
from gpunode.packages.repository import RpmShelf, desired_repository, plan_repository
from tests.cli import gpunode
from tests.files import write
from tests.packages.apt_root import PACKAGES

pytestmark = pytest.mark.xdist_group("apt")  # one repository, and one process that forks gpunode
NVIDIA = "https://nvidia.github.io"
GUIDE = f"{NVIDIA}/libnvidia-container/stable/deb/$(ARCH)"
NEWEST = dict.fromkeys(PACKAGES, "1.20.0-1")
RETIRED = (
    f"{NVIDIA}/nvidia-docker/ubuntu20.04/$(ARCH)",
    f"{NVIDIA}/libnvidia-container/ubuntu18.04/$(ARCH)",
    f"{NVIDIA}/libnvidia-container/stable/ubuntu18.04/$(ARCH)",
    f"{NVIDIA}/nvidia-container-runtime/debian10/amd64",
)


@pytest.fixture
def guide_key(apt):
    """NVIDIA's key in the path of its guide, as gpg --dearmor writes it."""
    path = apt.root / "usr/share/keyrings/nvidia-container-toolkit-keyring.gpg"
    path.parent.mkdir(parents=True)
    key = desired_repository().key
    path.write_bytes(subprocess.run(["gpg", "--dearmor"], input=key, capture_output=True, check=True).stdout)
    return path


def states(apt):
    data = apt.json("toolkit", "status")["data"]
    return {(one["entry"]["address"], one["state"]) for one in data["repositories"]}


def planned(apt, *argv):
    done = apt.json("toolkit", "install", "--dry-run", *argv)
    return {one["path"].removeprefix(f"{apt.sources}/"): one["action"] for one in done["data"]["changes"]}


@pytest.mark.parametrize("name", ["nvidia-container-toolkit.list", "mine.list", "../sources.list"])
def test_entry_added_by_the_guide_is_kept(apt, guide_key, name):
    (apt.sources / name).write_text(f"# a comment\ndeb [signed-by={guide_key}] {GUIDE} /\n")
    assert planned(apt) == {}
    assert states(apt) == {(GUIDE, "used")}


@pytest.mark.parametrize("signed", [True, False])
def test_entry_without_a_key_is_kept_if_apt_trusts_it(apt, guide_key, signed):
    if signed:
        (apt.root / "etc/apt/trusted.gpg.d/nvidia.gpg").write_bytes(guide_key.read_bytes())
    (apt.sources / "a.list").write_text(f"deb {GUIDE} /\n")
    assert states(apt) == {(GUIDE, "used" if signed else "other-key")}
    assert ("a.list" not in planned(apt)) == signed


def test_deb822_stanza_is_kept_too(apt, guide_key):
    (apt.sources / "nvidia.sources").write_text(
        f"Types: deb\nURIs: {GUIDE}\nSuites: /\nSigned-By: {guide_key}\n"
    )
    assert planned(apt) == {} and states(apt) == {(GUIDE, "used")}


def test_second_entry_with_another_key_is_disabled(apt, guide_key, repository):
    """The fault of NVIDIA/nvidia-container-toolkit#170."""
    good = f"{repository.url}/stable/deb/$(ARCH)"
    apt.ours.write_text(f"deb [signed-by={repository.key}] {good} /\n")
    (apt.sources / "libnvidia-container.list").write_text(f"deb [signed-by={guide_key}] {good} /\n")
    broken = subprocess.run(
        ["apt-get", "update"],
        env={**apt.env, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Conflicting values set for option Signed-By" in broken.stderr
    mirror = ("--repository", repository.url, "--key", str(repository.key))
    status = apt.gpunode("toolkit", "status")
    assert status.code == 1 and "Conflicting values" in status.out
    done = apt.gpunode("toolkit", "install", *mirror)
    assert (done.code, apt.installed()) == (0, NEWEST), done.err
    assert (apt.sources / "libnvidia-container.list.disabled-by-gpunode").exists()
    assert not (apt.sources / "libnvidia-container.list").exists()
    apt.apt("update")


@pytest.mark.parametrize("address", RETIRED)
def test_retired_repository_is_renamed(apt, repository, address):
    old = apt.sources / "nvidia-docker.list"
    text = f"deb {address} /\n#deb {NVIDIA}/libnvidia-container/experimental/ubuntu20.04/$(ARCH) /\n"
    old.write_text(text)
    status = apt.gpunode("toolkit", "status")
    assert status.code == 1 and "retired" in status.out and str(old) in status.out
    asked = ("--repository", repository.url, "--key", str(repository.key))
    put_aside = {"nvidia-docker.list": "removed", "nvidia-docker.list.disabled-by-gpunode": "created"}
    assert put_aside.items() <= planned(apt, *asked).items()
    if address != RETIRED[0]:
        return  # such a plan is carried out as it is
    done = apt.gpunode("toolkit", "install", *asked)
    assert (done.code, apt.installed()) == (0, NEWEST), done.err
    assert not old.exists()
    assert (apt.sources / "nvidia-docker.list.disabled-by-gpunode").read_text() == text
    apt.apt("update")


def test_only_retired_lines_of_a_shared_file_are_disabled(apt):
    main = apt.root / "etc/apt/sources.list"
    debian = "deb http://mirror.example.org/debian bookworm main\n"
    main.write_text(f"{debian}deb {RETIRED[0]} /\n{debian}")
    stanzas = apt.sources / "all.sources"
    stanzas.write_text(
        "Types: deb\nURIs: http://mirror.example.org/debian\nSuites: bookworm\nComponents: main\n\n"
        f"Enabled: yes\nTypes: deb\nURIs: {RETIRED[1]}\nSuites: /\n\n"
        "Types: deb\nURIs: http://security.example.org\nSuites: bookworm\nComponents: main\n"
    )
    done = apt.json("toolkit", "install", "--dry-run")["data"]
    diffs = {one["path"]: one["diff"] for one in done["changes"]}
    changed = [line for line in diffs[str(main)].splitlines()[2:] if line[:1] in "+-"]
    assert changed == [f"-deb {RETIRED[0]} /", f"+# switched off by gpunode: deb {RETIRED[0]} /"]
    changed = [line for line in diffs[str(stanzas)].splitlines()[2:] if line[:1] in "+-"]
    assert changed == ["-Enabled: yes", "+Enabled: no"]


def test_entry_that_shares_its_stanza_is_left_to_the_user(apt):
    (apt.sources / "all.sources").write_text(
        f"Types: deb\nURIs: http://mirror.example.org/debian {RETIRED[0]}\nSuites: /\n"
    )
    done = apt.gpunode("toolkit", "install", "--dry-run")
    assert done.code == 3 and "together with others" in done.err


def test_mirror_replaces_nvidias_url(apt, guide_key):
    (apt.sources / "mine.list").write_text(f"deb [signed-by={guide_key}] {GUIDE} /\n")
    apt.ours.write_text(f"deb [signed-by={guide_key}] {GUIDE} /\n")
    assert planned(apt, "--repository", "https://mirror.example.com/nvidia/") == {
        f"{apt.key}": "created",
        "nvidia-container-toolkit.list": "updated",
        "mine.list": "removed",
        "mine.list.disabled-by-gpunode": "created",
    }
    diffs = apt.json("toolkit", "install", "--dry-run", "--repository", "https://mirror.example.com/nvidia/")
    after = [
        line
        for one in diffs["data"]["changes"]
        if one["action"] in ("created", "updated") and "disabled" not in one["path"]
        for line in one["diff"].splitlines()
        if line.startswith("+")
    ]
    assert not any("nvidia.github.io" in line for line in after)


def test_experimental_channel_and_cuda_repository_are_ignored(apt, guide_key):
    apt.ours.write_text(
        f"deb [signed-by={guide_key}] {GUIDE} /\n"
        f"deb [signed-by={guide_key}] {NVIDIA}/libnvidia-container/experimental/deb/$(ARCH) /\n"
    )
    (apt.sources / "cuda.list").write_text(
        "deb https://developer.download.nvidia.com/compute/cuda/repos/x /\n"
    )
    assert planned(apt) == {}


def rpm_files(tmp_path, directory="etc/yum.repos.d", **files):
    place = tmp_path / directory
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / f"{name.replace('_', '-')}.repo").write_text(text)
    return Host(tmp_path, environ={})


def plan_rpm(host, base="", directory="/etc/yum.repos.d"):
    return plan_repository(host, RpmShelf(host, directory), desired_repository(base))


OFFICIAL = f"""[nvidia-container-toolkit]
name=nvidia-container-toolkit
baseurl={NVIDIA}/libnvidia-container/stable/rpm/$basearch
repo_gpgcheck=1
gpgcheck=0
enabled=1
gpgkey={NVIDIA}/libnvidia-container/gpgkey
sslverify=1
sslcacert=/etc/pki/tls/certs/ca-bundle.crt

[nvidia-container-toolkit-experimental]
name=nvidia-container-toolkit-experimental
baseurl={NVIDIA}/libnvidia-container/experimental/rpm/$basearch
repo_gpgcheck=1
gpgcheck=0
enabled=0
gpgkey={NVIDIA}/libnvidia-container/gpgkey
"""


def test_dnf_gets_one_file_and_a_key_of_this_node(tmp_path):
    files = plan_rpm(rpm_files(tmp_path)).files
    assert [one.path for one in files] == [
        "/etc/pki/rpm-gpg/RPM-GPG-KEY-nvidia-container-toolkit",
        "/etc/yum.repos.d/nvidia-container-toolkit.repo",
    ]
    assert files[1].content is not None
    text = files[1].content.decode()
    assert f"baseurl={NVIDIA}/libnvidia-container/stable/rpm/$basearch\n" in text
    assert "gpgkey=file:///etc/pki/rpm-gpg/RPM-GPG-KEY-nvidia-container-toolkit\n" in text
    assert "repo_gpgcheck=1\n" in text


def test_mirror_for_dnf_uses_no_other_host(tmp_path):
    files = plan_rpm(
        rpm_files(tmp_path, nvidia_container_toolkit=OFFICIAL), "https://mirror.example.com"
    ).files
    assert "https://mirror.example.com/stable/rpm/" in (files[1].content or b"").decode()
    assert all(b"nvidia.github.io" not in (one.content or b"") for one in files)


@pytest.mark.parametrize("directory", ["etc/yum.repos.d", "etc/zypp/repos.d"])
def test_repo_file_of_nvidia_is_kept(tmp_path, directory):
    host = rpm_files(tmp_path, directory, nvidia_container_toolkit=OFFICIAL)
    plan = plan_rpm(host, directory=f"/{directory}")
    assert (plan.files, plan.id) == ((), "nvidia-container-toolkit")


def test_only_retired_sections_of_a_shared_file_are_disabled(tmp_path):
    old = (
        f"[libnvidia-container]\nbaseurl={NVIDIA}/libnvidia-container/centos7/$basearch\nenabled=1\n\n"
        "[epel]\nbaseurl=https://epel.example.com\nenabled=1\n"
    )
    host = rpm_files(tmp_path, nvidia_container_toolkit=OFFICIAL, mixed=old)
    (change,) = plan_rpm(host).files
    assert change.content == old.replace("enabled=1\n\n", "\n").replace("r]\n", "r]\nenabled=0\n").encode()


def test_file_with_only_retired_sections_is_renamed(tmp_path):
    old = "".join(
        f"[{name}]\nbaseurl={NVIDIA}/{name}/centos7/$basearch\n"
        for name in ("nvidia-docker", "libnvidia-container", "nvidia-container-runtime")
    )
    host = rpm_files(tmp_path, nvidia_container_toolkit=OFFICIAL, nvidia_docker=old)
    path = "/etc/yum.repos.d/nvidia-docker.repo"
    kept, gone = plan_rpm(host).files  # in this order: a kill in between leaves both
    assert (gone.path, gone.content) == (path, None)
    assert kept == FileChange(f"{path}.disabled-by-gpunode", old.encode(), kept.reason)


def test_recorded_machine_uses_its_repository_files(tmp_path):
    """Neither apt nor its output is in a support bundle of an older gpunode."""
    for path, text in (
        ("etc/os-release", "ID=ubuntu\nID_LIKE=debian\nVERSION_ID=24.04\n"),
        ("etc/apt/sources.list.d/libnvidia-container.list", f"deb {GUIDE} /\n"),
        (
            "var/lib/dpkg/status",
            "".join(f"Package: {one}\nStatus: hold ok installed\nVersion: 1.20.0-1\n\n" for one in PACKAGES),
        ),
    ):
        write(tmp_path, path, text)
    status = gpunode("toolkit", "status", "--root", str(tmp_path), "-o", "json").document["data"]
    assert (status["manager"], status["version"]) == ("apt", "1.20.0-1")
    assert all(one["pinned"] for one in status["packages"])
    assert [one["state"] for one in status["repositories"]] == ["other-key"]
    plan = gpunode("toolkit", "install", "--dry-run", "--root", str(tmp_path), "-o", "json").document["data"]
    assert "/etc/apt/sources.list.d/libnvidia-container.list" in [one["path"] for one in plan["changes"]]
