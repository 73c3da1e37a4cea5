"""dnf and zypper by recorded runs; test_dnf_zypper_real.py has the real ones.

The output follows dnf 4.14 (RHEL 9), dnf 5.2 (Fedora 41) and zypper 1.14 (SLES 15); exit codes are those of
dnf(8) and zypper(8).
"""

import json
import shlex

import pytest

from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.packages.dnf import Dnf, compare
from gpunode.packages.manager import Command, PackageRequest, PackagesError, Trouble, run_command
from gpunode.packages.zypper import Zypper
from tests.cli import gpunode
from tests.files import write
from tests.packages.apt_root import PACKAGES

REPOQUERY = r"%{name} %{evr} %{repoid}\n"
RPM_QUERY = r"%{NAME}\t%{EVR}\n"


def recorded(root, os_release, commands, *programs):
    """A machine with these outputs of commands: stdout, or (stdout, code)."""
    answers = {}
    for argv, answer in commands.items():
        out, code = answer if isinstance(answer, tuple) else (answer, 0)
        answers[shlex.join(argv)] = {"stdout": out, "code": code}
    for path, text in (
        ("etc/os-release", os_release),
        (
            ".gpunode/recording.json",
            json.dumps({"apiVersion": "gpunode/v1", "kind": "Recording", "commands": answers}),
        ),
    ):
        write(root, path, text)
    for program in programs:
        write(root, f"usr/bin/{program}", "#!/bin/sh\n", 0o755)
    return root


def rpm_output(version):
    argv = ("rpm", "-q", "--qf", RPM_QUERY, *PACKAGES)
    lines = [f"{name}\t{version}" if version else f"package {name} is not installed" for name in PACKAGES]
    return {argv: ("".join(f"{line}\n" for line in lines), 0 if version else len(PACKAGES))}


def dnf_offers(program, *offers):
    lines = [f"{name} {version} {repository}\n" for name in PACKAGES for version, repository in offers]
    return {(program, "-q", "repoquery", "--available", "--qf", REPOQUERY, *PACKAGES): "\n".join(lines)}


def zypper_offers(*offers):
    rows = "".join(
        f'<solvable status="not-installed" name="{name}" kind="package" edition="{version}" arch="x86_64"'
        f' repository="{repository}"/>\n'
        for name in PACKAGES
        for version, repository in offers
    )
    argv = ("zypper", "--non-interactive", "--no-refresh", "--xmlout", "search", "--details", "--match-exact")
    return {(*argv, "-t", "package", *PACKAGES): f"<?xml version='1.0'?>\n<stream>{rows}</stream>\n"}


RHEL = 'ID="rhel"\nVERSION_ID="9.4"\nPRETTY_NAME="Red Hat Enterprise Linux 9.4"\n'
SLES = 'ID="sles"\nVERSION_ID="15.6"\nPRETTY_NAME="SUSE Linux Enterprise Server 15 SP6"\n'
TWO = (
    ("1.19.0-1", "nvidia-container-toolkit"),
    ("1.20.0-1", "nvidia-container-toolkit"),
    ("1.20.0-1", "cuda-rhel9"),
)


def test_upgrade_with_a_version_upgrades_to_that_version(tmp_path):
    root = recorded(tmp_path, RHEL, rpm_output("1.18.0-1") | dnf_offers("dnf", *TWO), "dnf")
    argv = ("toolkit", "install", "--dry-run", "--root", str(root), "-o", "json")
    for options in (("--upgrade", "--version", "1.19.0"), ("--version", "1.19.0")):
        *_, install = gpunode(*argv, *options).document["data"]["commands"]
        assert shlex.split(install)[-len(PACKAGES) :] == [f"{name}-1.19.0-1" for name in PACKAGES]
    assert "-1.20.0-1" in gpunode(*argv, "--upgrade").document["data"]["commands"][-1]
    assert gpunode(*argv).document["data"]["commands"] == [], "without both it stays"


@pytest.mark.parametrize("program", ["dnf", "dnf5"])
def test_dnf_status_and_plan(tmp_path, program):
    root = recorded(tmp_path, RHEL, rpm_output("1.19.0-1") | dnf_offers(program, *TWO), program)
    status = gpunode("toolkit", "status", "--root", str(root), "-o", "json").document["data"]
    assert (status["manager"], status["version"]) == ("dnf", "1.19.0-1")
    assert status["packages"][0]["candidate"] == "1.20.0-1"
    assert status["packages"][0]["candidateOrigins"] == ["nvidia-container-toolkit", "cuda-rhel9"]
    plan = gpunode(
        "toolkit", "install", "--upgrade", "--hold", "--dry-run", "--root", str(root), "-o", "json"
    )
    names = [f"{name}-1.20.0-1" for name in PACKAGES]
    impatient = [] if program == "dnf5" else ["--setopt=exit_on_lock=True"]
    assert [shlex.split(one) for one in plan.document["data"]["commands"]] == [
        [
            program,
            "-y",
            *impatient,
            "makecache",
            "--refresh",
            "--disablerepo=*",
            "--enablerepo=nvidia-container-toolkit",
            "--setopt=nvidia-container-toolkit.skip_if_unavailable=False",
        ],
        [program, "-y", *impatient, "install", *names],
        [program, "-y", "versionlock", "add", *PACKAGES],
    ]


def test_missing_repository_is_added_and_its_version_named(tmp_path):
    root = recorded(tmp_path, RHEL, rpm_output("") | dnf_offers("dnf"), "dnf")
    plan = gpunode(
        "toolkit", "install", "--version", "1.20.0", "--dry-run", "--root", str(root), "-o", "json"
    )
    data = plan.document["data"]
    assert [one["path"] for one in data["changes"]] == [
        "/etc/pki/rpm-gpg/RPM-GPG-KEY-nvidia-container-toolkit",
        "/etc/yum.repos.d/nvidia-container-toolkit.repo",
    ]
    assert data["commands"][1].split()[-4:] == [f"{name}-1.20.0-1" for name in PACKAGES]
    assert not (root / "etc/yum.repos.d").exists()


def test_zypper_status_and_plan(tmp_path):
    root = recorded(tmp_path, SLES, rpm_output("1.20.0-1") | zypper_offers(*TWO[:2]), "zypper")
    status = gpunode("toolkit", "status", "--root", str(root), "-o", "json").document["data"]
    assert (status["manager"], status["version"]) == ("zypper", "1.20.0-1")
    plan = gpunode(
        "toolkit", "install", "--version", "1.19.0", "--dry-run", "--root", str(root), "-o", "json"
    )
    quiet = ["zypper", "--non-interactive"]
    assert [shlex.split(one) for one in plan.document["data"]["commands"]] == [
        [*quiet, "--gpg-auto-import-keys", "refresh", "nvidia-container-toolkit"],
        [*quiet, "install", "--oldpackage", *(f"{name}=1.19.0-1" for name in PACKAGES)],
    ]
    assert plan.document["data"]["changes"][1]["path"] == "/etc/zypp/repos.d/nvidia-container-toolkit.repo"


def test_package_unknown_to_zypper_is_refused(tmp_path):
    ((argv, _),) = zypper_offers().items()
    commands = rpm_output("") | {argv: ("<stream></stream>", 104)}
    root = recorded(tmp_path, SLES, commands, "zypper")
    assert gpunode("toolkit", "status", "--root", str(root)).code == 0


def test_differing_candidates_are_refused_with_a_common_version(tmp_path):
    offers = dnf_offers("dnf", *TWO)
    ((argv, text),) = offers.items()
    newer = f"{text}\n{PACKAGES[1]} 1.21.0-1 cuda-rhel9\n"
    root = recorded(tmp_path, RHEL, rpm_output("") | {argv: newer}, "dnf")
    done = gpunode("toolkit", "install", "--dry-run", "--root", str(root))
    assert done.code == 3 and "newest versions differ" in done.err and "--version 1.20.0-1" in done.err


@pytest.mark.parametrize(
    ("os_release", "extra", "message"),
    [
        ("ID=flatcar\nNAME=Flatcar\n", "", "system extension"),
        ("ID=talos\n", "", "schematic"),
        ("ID=bottlerocket\n", "", "-nvidia variants"),
        ("ID=cos\n", "", "cos-extensions install gpu"),
        ("ID=nixos\n", "", "hardware.nvidia-container-toolkit.enable"),
        ("ID=opensuse-microos\n", "", "transactional-update"),
        ("ID=opensuse-leap-micro\nID_LIKE=suse\n", "", "transactional-update"),
        ("ID=fedora\nVARIANT_ID=coreos\n", "run/ostree-booted", "rpm-ostree install"),
        ("ID=gentoo\nNAME=Gentoo\n", "", "by this system's own means"),
    ],
)
@pytest.mark.parametrize("verb", [("install", "--dry-run"), ("status",), ("remove", "--dry-run")])
def test_system_without_packages_is_refused_with_an_alternative(tmp_path, os_release, extra, message, verb):
    root = recorded(tmp_path, os_release, {})
    if extra:
        (root / extra).parent.mkdir(parents=True)
        (root / extra).touch()
    done = gpunode("toolkit", *verb, "--root", str(root))
    assert done.code == 3 and message in done.err


def test_other_root_is_never_installed_into(tmp_path):
    root = recorded(tmp_path, RHEL, rpm_output("") | dnf_offers("dnf"), "dnf")
    done = gpunode("toolkit", "install", "--root", str(root))
    assert done.code == 3 and "leave --root out" in done.err


def answer(code, out="", err=""):
    return Completed(("x",), code, out, err)


@pytest.mark.parametrize(
    ("done", "trouble"),
    [
        (answer(0), None),
        (answer(200, err="metadata already locked by 4711"), Trouble.LOCKED),
        (answer(1, err="Failed to obtain rpm transaction lock. Another is in progress."), Trouble.LOCKED),
        (answer(1, err="Error: Unable to find a match: nvidia-container-toolkit-9-1"), Trouble.NOT_FOUND),
        (answer(1, err="Error: repomd.xml GPG signature verification error: Bad"), Trouble.SIGNATURE),
        (answer(1, err="Curl error (6): Couldn't resolve host name for https://x"), Trouble.NETWORK),
        (answer(1, err="Status code: 404 for https://x/repomd.xml (IP: ::1)"), Trouble.NO_REPOSITORY),
        (answer(1, err="[MIRROR] x.rpm: Status code: 404 for https://x/x.rpm"), Trouble.NOT_FOUND),
        (
            answer(1, err="Curl error (60): x [SSL certificate problem: certificate is not yet valid]"),
            Trouble.CLOCK,
        ),
        (
            answer(1, err="Curl error (60): x [SSL certificate problem: self-signed certificate]"),
            Trouble.CERTIFICATE,
        ),
        (answer(1, err="can't create transaction lock on x (Read-only file system)"), Trouble.READ_ONLY),
        (answer(1, err=" Problem: conflicting requests\n  - nothing provides libfoo"), Trouble.DEPENDENCIES),
        (answer(1), Trouble.OTHER),
        (Completed(("dnf",), -9, "", "", True), Trouble.TIMED_OUT),
    ],
)  # fmt: skip
def test_dnf_failure_is_explained(tmp_path, done, trouble):
    failure = Dnf(Host(tmp_path, environ={})).explain(done)
    assert (failure.trouble if failure else None) is trouble


@pytest.mark.parametrize(
    ("done", "trouble"),
    [
        (answer(0), None),
        (answer(102), None),
        (answer(103), None),
        (
            answer(7, err="System management is locked by the application with pid 815 (zypper)."),
            Trouble.LOCKED,
        ),
        (answer(104, out="'x' not found in package names."), Trouble.NOT_FOUND),
        (answer(4, out="Problem: nothing provides libfoo"), Trouble.DEPENDENCIES),
        (answer(106, err="Download (curl) error for 'https://x'"), Trouble.NETWORK),
        (answer(4, err="File '/repodata/repomd.xml' not found on medium 'https://x'"), Trouble.NO_REPOSITORY),
        (answer(8, err="Signature verification failed for file 'repomd.xml'"), Trouble.SIGNATURE),
    ],
)
def test_zypper_failure_is_explained(tmp_path, done, trouble):
    failure = Zypper(Host(tmp_path, environ={})).explain(done)
    assert (failure.trouble if failure else None) is trouble


class Recorded:
    """Messages printed while it works."""

    def __init__(self):
        self.steps = []

    def step(self, text):
        from contextlib import nullcontext

        self.steps.append(text)
        return nullcontext()

    def note(self, text):
        self.steps.append(text)

    info = note

    def following(self, text, name):
        from contextlib import nullcontext

        self.steps.append(text)
        return nullcontext(self.steps.append)


class Locked(Host):
    """A machine with a locked package manager for the first two tries."""

    tries = 0

    def run(self, argv, **_):
        Locked.tries += 1
        if Locked.tries <= 2:
            return Completed(tuple(argv), 200, "", "metadata already locked by 4711")
        return Completed(tuple(argv), 0, "", "")

    def sleep(self, seconds):
        pass


def test_lock_reported_only_by_the_manager_is_retried(tmp_path):
    Locked.tries = 0
    host, progress = Locked(tmp_path, environ={}), Recorded()
    run_command(host, Dnf(host), Command(("dnf", "-y", "install", "x")), progress)
    assert Locked.tries == 3
    assert sum("already locked by 4711" in step for step in progress.steps) == 1  # a line per second is noise


def test_lock_retries_are_limited(tmp_path):
    Locked.tries = -1_000_000_000
    host = Locked(tmp_path, environ={})
    with pytest.raises(PackagesError) as raised:
        run_command(host, Dnf(host), Command(("dnf", "-y", "install", "x")), Recorded(), wait_seconds=0.2)
    assert (raised.value.code, raised.value.exit_code) == ("package-manager-locked", 3)


def test_files_are_installed_without_a_repository(tmp_path):
    host = Host(tmp_path, environ={})
    older = Dnf(host).install_files(["/a.rpm"], downgrade=True)
    assert older.argv[-3:] == ("downgrade", "--disablerepo=*", "/a.rpm")
    assert Zypper(host).install_files(["/a.rpm"]).argv[-2:] == ("--allow-unsigned-rpm", "/a.rpm")
    assert Zypper(host).install([PackageRequest("a"), PackageRequest("b", "1-1")]).argv[-2:] == ("a", "b=1-1")


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        ("1.20.0-1", "1.20.0-1", 0),
        ("1.20.0-1", "1.9.9-1", 1),
        ("1.17.0~rc.2-1", "1.17.0-1", -1),
        ("1.17.0~rc.1-1", "1.17.0~rc.2-1", -1),
        ("0.1.0-1", "0.1.0.beta.1-1", -1),
        ("3:595.91.07-1.el9", "600.1-1", 1),
        ("1.0^git1-1", "1.0-1", 1),
        ("1.0^git1-1", "1.0.1-1", -1),
        ("1.0a-1", "1.0-1", 1),
        ("1.0a-1", "1.0.1-1", -1),
        ("1.20.0-1", "1.20.0-2", -1),
    ],
)
def test_versions_are_ordered_as_by_rpm(first, second, order):
    assert compare(first, second) == order
    assert compare(second, first) == -order


def brought(root):
    """A journal in which gpunode installed the four."""
    entry = root / "var/lib/gpunode/journal/20261121T000000Z-toolkit-install"
    entry.mkdir(parents=True)
    manifest = {
        "id": entry.name,
        "sequence": 1,
        "operation": "toolkit-install",
        "state": "committed",
        "engine": "",
    }
    manifest |= {"units": [], "files": [], "packages": dict.fromkeys(PACKAGES, "")}
    (entry / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("runtimes", ["nvidia", "other"])
def test_toolkit_is_kept_while_an_engine_uses_the_runtime(tmp_path, runtimes):
    """An engine without its default runtime starts no container at all."""
    commands = rpm_output("1.20.0-1") | {("dockerd", "--version"): "Docker version 27.0.0"}
    root = recorded(tmp_path, RHEL, commands, "dnf", "dockerd")
    brought(root)
    program = "/usr/bin/nvidia-container-runtime" if runtimes == "nvidia" else "/usr/bin/crun"
    (root / "etc/docker").mkdir(parents=True)
    (root / "etc/docker/daemon.json").write_text(json.dumps({"runtimes": {runtimes: {"path": program}}}))
    done = gpunode("toolkit", "remove", "--dry-run", "--root", str(root))
    if runtimes == "nvidia":
        assert done.code == 3 and "docker has the runtime nvidia (/etc/docker/daemon.json)" in done.err
        assert f"gpunode --root {root} unconfigure-runtime --runtime docker" in done.err
    else:
        assert done.code == 0 and f"remove --noautoremove {' '.join(PACKAGES)}" in done.out
