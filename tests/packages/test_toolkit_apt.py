"""`gpunode toolkit` on a real apt with a signed repository, as a user runs it."""

import shutil
import subprocess

import pytest

from tests.cli import clean_environment, command
from tests.packages.apt_root import (
    PACKAGES,
    Signer,
    architecture,
    build,
    four,
    from_mirror,
    journal,
    make_repository,
)

pytestmark = pytest.mark.xdist_group("apt")  # one repository, and one process that forks gpunode
NEWEST = dict.fromkeys(PACKAGES, "1.20.0-1")
OLDER = dict.fromkeys(PACKAGES, "1.19.0-1")


def times(apt):
    """Modification times of all files, except apt's own cache of its indexes."""
    found = {path: path.stat().st_mtime_ns for path in apt.root.rglob("*")}
    return {path: when for path, when in found.items() if "var/cache" not in str(path)}


def test_install_adds_the_repository_once_and_a_second_run_changes_nothing(apt, repository):
    done = apt.gpunode("toolkit", "install", *from_mirror(repository))
    assert (done.code, apt.installed()) == (0, NEWEST), done.err
    assert "next: gpunode configure-runtime" in done.out
    assert apt.ours.read_text() == f"deb [signed-by={apt.key}] {repository.url}/stable/deb/$(ARCH) /\n"
    assert apt.key.stat().st_mode & 0o777 == 0o644
    before = apt.tree()
    for again in ((), from_mirror(repository)):
        second = apt.json("toolkit", "install", *again)["data"]
        assert (second["changes"], second["commands"], second["journal"]) == ([], [], "")
    assert apt.tree() == before and len(journal(apt)) == 1


def test_dry_run_shows_files_and_commands_and_writes_nothing(apt, repository):
    everything = times(apt)
    shown = apt.json("toolkit", "install", *from_mirror(repository), "--version", "1.19.0", "--dry-run")
    assert shown["exitCode"] == 0 and shown["data"]["dryRun"]
    assert times(apt) == everything
    for change in shown["data"]["changes"]:
        assert change["action"] == "created" and change["diff"]
    done = apt.json("toolkit", "install", *from_mirror(repository), "--version", "1.19.0")
    assert done["data"]["commands"] == shown["data"]["commands"]
    assert done["data"]["changes"] == shown["data"]["changes"]
    assert apt.installed() == OLDER


@pytest.mark.full
def test_pinned_version_applies_to_all_four_packages_and_is_held(apt, repository):
    apt.gpunode("toolkit", "install", *from_mirror(repository))
    done = apt.gpunode("toolkit", "install", "--version", "1.19.0", "--hold")
    assert (done.code, apt.installed()) == (0, OLDER), done.err
    apt.apt("-y", "upgrade")
    assert apt.installed() == OLDER
    refused = apt.gpunode("toolkit", "install", "--upgrade")
    assert (
        refused.code == 3
        and "held at 1.19.0-1: nvidia-container-toolkit," in refused.err
        and "apt-mark unhold" in refused.err
    )
    status = apt.json("toolkit", "status")["data"]
    assert status["version"] == "1.19.0-1" and all(one["pinned"] for one in status["packages"])
    assert apt.gpunode("toolkit", "install", "--upgrade", "--hold").code == 0
    assert apt.installed() == NEWEST
    assert all(one["pinned"] for one in apt.json("toolkit", "status")["data"]["packages"])


@pytest.mark.full
def test_newer_version_is_reported_and_installed_only_on_request(apt, repository):
    apt.gpunode("toolkit", "install", *from_mirror(repository), "--version", "1.19.0-1")
    done = apt.gpunode("toolkit", "install")
    assert done.code == 0 and "1.20.0-1 is offered" in done.err and apt.installed() == OLDER
    assert apt.gpunode("toolkit", "install", "--upgrade").code == 0
    assert apt.installed() == NEWEST


def test_unavailable_version_changes_nothing(apt, repository):
    before = apt.tree()
    done = apt.gpunode("toolkit", "install", *from_mirror(repository), "--version", "9.9.9")
    assert done.code == 4 and "offers nvidia-container-toolkit 9.9.9-1" in done.err
    assert "1.20.0-1, 1.19.0-1" in done.err
    assert (apt.tree(), apt.installed()) == (before, {})
    assert [one["state"] for one in journal(apt)] == ["rolled-back"]


@pytest.mark.full
def test_pin_hiding_all_versions_is_named_and_a_named_version_installed(apt, repository):
    pin = "Package: *nvidia*\nPin: release *\nPin-Priority: -1\n"
    (apt.root / "etc/apt/preferences.d/no-nvidia").write_text(pin)
    done = apt.gpunode("toolkit", "install", *from_mirror(repository))
    assert done.code == 4 and "a pin or priority" in done.err and "1.20.0-1, 1.19.0-1: --version" in done.err
    done = apt.gpunode("toolkit", "install", *from_mirror(repository), "--version", "1.19.0")
    assert (done.code, apt.installed()) == (0, OLDER), done.err


@pytest.mark.full
def test_partial_upgrade_is_detected_and_repaired(apt, repository, signer, tmp_path):
    loose = make_repository(tmp_path / "loose", signer)
    for version in ("1.19.0-1", "1.20.0-1"):  # older rpms and debs didn't demand each other exactly
        for name in PACKAGES:
            build(loose.flat, name, version)
    loose.index()
    apt.gpunode("toolkit", "install", *from_mirror(loose), "--version", "1.19.0")
    apt.apt("-y", "install", "libnvidia-container1=1.20.0-1")
    status = apt.gpunode("toolkit", "status")
    assert status.code == 1 and "at different versions" in status.out
    assert apt.gpunode("toolkit", "install").code == 0
    assert apt.installed() == NEWEST
    apt.apt("-y", "remove", "nvidia-container-toolkit")
    status = apt.gpunode("toolkit", "status")
    assert status.code == 1 and "not installed: nvidia-container-toolkit" in status.out


def test_remove_removes_only_what_install_added(apt, repository):
    (apt.sources / "other.list").write_text("# nothing\n")
    before = apt.tree()
    apt.gpunode("toolkit", "install", *from_mirror(repository), "--hold")
    shown = apt.json("toolkit", "remove", "--dry-run")["data"]
    assert apt.installed() == NEWEST and len(shown["commands"]) == 2
    done = apt.gpunode("toolkit", "remove")
    assert (done.code, apt.installed(), apt.tree()) == (0, {}, before), done.err
    again = apt.gpunode("toolkit", "remove")
    assert again.code == 0 and "nothing here" in again.out


@pytest.mark.full
def test_reset_removes_the_toolkit_that_gpunode_installed(apt, repository):
    before = apt.tree()
    apt.gpunode("toolkit", "install", *from_mirror(repository))
    shown = apt.json("reset", "--dry-run")["data"]
    (step,) = (one for one in shown["steps"] if one["state"] == "planned")
    assert step["name"] == "toolkit" and "apt-get remove" in step["result"]["commands"][0]
    assert apt.installed() == NEWEST
    done = apt.gpunode("reset", "--yes")
    assert (done.code, apt.installed(), apt.tree()) == (0, {}, before), done.err
    again = apt.gpunode("reset")
    assert again.code == 0 and again.out.startswith("nothing to reset")


@pytest.mark.full
def test_remove_keeps_packages_installed_by_others(apt, repository):
    apt.ours.write_text(f"deb [signed-by={repository.key}] {repository.url}/stable/deb/{architecture()} /\n")
    apt.apt("update")
    apt.apt("-y", "install", *(f"{name}=1.19.0-1" for name in PACKAGES))
    assert apt.gpunode("toolkit", "install", "--upgrade").code == 0
    done = apt.json("toolkit", "remove")["data"]
    assert done["packages"] == [] and done["kept"] == list(PACKAGES) and "apt-get remove" in done["byHand"]
    assert apt.installed() == NEWEST


def test_file_edited_since_is_kept(apt, repository):
    apt.gpunode("toolkit", "install", *from_mirror(repository))
    apt.ours.write_text(apt.ours.read_text() + "# mine\n")
    done = apt.gpunode("toolkit", "remove")
    assert done.code == 0 and "changed since gpunode wrote it" in done.out
    assert apt.ours.exists() and not apt.key.exists() and apt.installed() == {}


@pytest.mark.full
def test_foreign_package_depending_on_the_toolkit_is_not_removed(apt, repository, tmp_path):
    apt.gpunode("toolkit", "install", *from_mirror(repository))
    needy = build(tmp_path, "my-cluster", "1.0", extra="Depends: nvidia-container-toolkit\n")
    apt.apt("-y", "install", str(needy))
    done = apt.gpunode("toolkit", "remove")
    assert done.code == 3 and "my-cluster" in done.err
    assert set(apt.installed()) == {*PACKAGES, "my-cluster"}


def test_partially_failed_install_is_rolled_back(apt, repository, tmp_path):
    other = build(tmp_path, "other", "1.0", files=("usr/bin/nvidia-ctk",))
    apt.apt("-y", "install", str(other))
    before = apt.tree()
    done = apt.gpunode("toolkit", "install", *from_mirror(repository))
    assert done.code == 4 and "trying to overwrite" in done.err and "were restored" in done.err
    assert (apt.installed(), apt.tree()) == ({"other": "1.0"}, before)


def test_a_dependency_that_stays_after_a_failed_install_is_named_with_its_command(apt, signer, tmp_path):
    mirror = make_repository(tmp_path / "mirror", signer, "1.20.0-1")
    build(mirror.flat, "helper", "2.0")
    (mirror.flat / f"nvidia-container-toolkit-base_1.20.0-1_{architecture()}.deb").unlink()
    files = ("usr/bin/nvidia-ctk",)
    build(mirror.flat, "nvidia-container-toolkit-base", "1.20.0-1", files=files, extra="Depends: helper\n")
    mirror.index()
    apt.apt("-y", "install", str(build(tmp_path, "other", "1.0", files=files)))
    done = apt.gpunode("toolkit", "install", *from_mirror(mirror), "-o", "json")
    assert done.code == 1 and done.document["errors"][0]["code"] == "not-restored", done.err
    assert (
        "trying to overwrite" in done.err and "other packages are not as before: helper 2.0 (new)" in done.err
    )
    assert "hint: apt-get remove -y -q helper" in done.err
    assert apt.installed() == {"other": "1.0", "helper": "2.0"} and not apt.ours.exists()


@pytest.mark.full
def test_partially_failed_upgrade_restores_the_old_version(apt, signer, tmp_path):
    mirror = make_repository(tmp_path / "mirror", signer, "1.19.0-1")
    apt.gpunode("toolkit", "install", *from_mirror(mirror))
    other = build(tmp_path, "other", "1.0", files=("usr/bin/stray",))
    apt.apt("-y", "install", str(other))
    four(mirror.flat, "1.20.0-1")
    base = mirror.flat / f"nvidia-container-toolkit-base_1.20.0-1_{architecture()}.deb"
    base.unlink()
    build(mirror.flat, "nvidia-container-toolkit-base", "1.20.0-1", files=("usr/bin/stray",))
    mirror.index()
    done = apt.gpunode("toolkit", "install", "--upgrade")
    assert done.code == 4 and "trying to overwrite" in done.err
    assert apt.installed() == {**OLDER, "other": "1.0"}
    assert (apt.root / "usr/bin/nvidia-ctk").read_text() == "nvidia-container-toolkit-base 1.19.0-1\n"


def test_expired_key_is_reported_and_leaves_no_changes(apt, tmp_path):
    expired = Signer(expired=True)
    try:
        mirror = make_repository(tmp_path / "mirror", expired, "1.20.0-1")
        before = apt.tree()
        done = apt.gpunode("toolkit", "install", *from_mirror(mirror))
    finally:
        expired.close()
    assert done.code == 4 and "EXPKEYSIG" in done.err and "--key FILE" in done.err
    assert (apt.tree(), apt.installed()) == (before, {})


def test_repository_signed_by_another_key_is_refused(apt, repository):
    done = apt.gpunode("toolkit", "install", "--repository", repository.url)  # with NVIDIA's key
    assert done.code == 4 and "NO_PUBKEY" in done.err
    assert not apt.ours.exists() and not apt.key.exists()


def test_index_changed_after_signing_is_refused(apt, signer, tmp_path):
    mirror = make_repository(tmp_path / "mirror", signer, "1.20.0-1")
    release = mirror.flat / "InRelease"
    release.write_bytes(release.read_bytes().replace(b"Label: test", b"Label: evil"))
    done = apt.gpunode("toolkit", "install", *from_mirror(mirror))
    assert done.code == 4 and "BADSIG" in done.err and apt.installed() == {}


def test_missing_mirror_is_reported(apt, repository, tmp_path):
    key = str(repository.key)
    done = apt.gpunode("toolkit", "install", "--repository", f"file:{tmp_path}/none", "--key", key)
    assert done.code == 4 and "Release file" in done.err and not apt.ours.exists()


def while_it_waits(argv, apt, other):
    """Run it; the other process ends once the run has printed that it waits, so the wait is short."""
    child = subprocess.Popen(
        argv, env=clean_environment(apt.env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    message = []
    assert child.stderr
    for line in child.stderr:
        message.append(line)
        if "waiting" in line:
            other.stdin.close()
    child.communicate()
    return child.returncode, "".join(message)


@pytest.mark.full
def test_other_process_is_waited_for_with_a_message(apt, repository):
    with apt.locked() as other:
        code, message = while_it_waits(command("toolkit", "install", *from_mirror(repository)), apt, other)
    assert code == 0 and apt.installed() == NEWEST
    assert f"(process {other.pid})" in message and "lock-frontend (600 s at most)" in message


@pytest.mark.full
@pytest.mark.parametrize("name", ["lock-frontend", "lock"])
def test_wait_has_a_limit_and_nothing_is_written(apt, repository, name):
    before = apt.tree()
    with apt.locked(name) as other:
        done = apt.gpunode("toolkit", "install", *from_mirror(repository), "--lock-timeout", "0.3")
    assert done.code == 3 and f"python3 (process {other.pid}) holds" in done.err
    assert (apt.tree(), apt.installed(), journal(apt)) == (before, {}, [])


@pytest.mark.full
def test_lock_hidden_by_the_kernel_is_waited_for(apt, repository, tmp_path):
    """Inside a container /proc/locks may not list it; apt's own message then names the process."""
    hidden = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /proc/locks && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    argv = command("toolkit", "install", *from_mirror(repository), "--lock-timeout", "30")
    with apt.locked() as other:
        code, message = while_it_waits([*hidden, *argv], apt, other)
    assert code == 0 and "waiting: E: Could not get lock" in message and apt.installed() == NEWEST, message
    assert message.count("waiting: ") == 1


@pytest.mark.full
def test_packages_are_installed_from_a_directory(apt, repository, tmp_path):
    place = tmp_path / "media"
    shutil.copytree(repository.flat, place)
    several = apt.gpunode("toolkit", "install", "--from", str(place))
    assert several.code == 2 and "1.19.0-1, 1.20.0-1" in several.err
    done = apt.gpunode("toolkit", "install", "--from", str(place), "--version", "1.20.0")
    assert (done.code, apt.installed()) == (0, NEWEST), done.err
    assert (
        not apt.ours.exists()
        and not apt.key.exists()
        and "signatures of packages in a directory are not checked" in done.err
    )
    assert (
        apt.json("toolkit", "install", "--from", str(place), "--version", "1.20.0")["data"]["commands"] == []
    )
    assert apt.gpunode("toolkit", "install", "--from", str(place), "--version", "1.19.0").code == 0
    assert apt.installed() == OLDER
    assert apt.gpunode("toolkit", "remove").code == 0
    assert apt.installed() == {}


def test_directory_with_missing_or_foreign_packages_is_refused(apt, repository, tmp_path):
    place = tmp_path / "media"
    place.mkdir()
    assert apt.gpunode("toolkit", "install", "--from", str(place)).code == 2
    for path in repository.flat.glob("*1.20.0*.deb"):
        shutil.copy(path, place)
    next(place.glob("libnvidia-container1_*")).unlink()
    done = apt.gpunode("toolkit", "install", "--from", str(place))
    assert done.code == 2 and "missing: libnvidia-container1" in done.err
    other = "riscv64" if architecture() != "riscv64" else "amd64"
    build(place, "libnvidia-container1", "1.20.0-1", arch=other)
    assert "missing: libnvidia-container1" in apt.gpunode("toolkit", "install", "--from", str(place)).err
    (place / "broken.deb").write_bytes(b"no archive")
    done = apt.gpunode("toolkit", "install", "--from", str(place))
    assert done.code == 2 and "broken.deb is not a complete package" in done.err
    assert apt.installed() == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--repository", "nvidia.example.com"), "is not the address of a repository"),
        (("--repository", "https://a.example.com/x y"), "is not the address of a repository"),
        (("--repository", "https://a.example.com/\nevil"), "is not the address of a repository"),
        (("--repository", "https://me:secret@a.example.com/"), "would be readable by every user"),
        (("--key", "/nonexistent"), "there is no file"),
        (("--key", "/etc/hostname"), "is not an OpenPGP public key"),
        (("--from", "/nonexistent"), "is not a directory"),
        (("--from", "/tmp", "--repository", "https://a.example.com"), "no repository is added"),
        (("--version", "1.20; true"), "is not a version"),
        (("--version", "newest"), "is not a version"),
        *((("--version", version), "is not a version") for version in ("1.x", "1", "1.17.0.0", "1.17.0-")),
    ],
)
def test_contradicting_options_are_refused_before_any_change(apt, argv, message):
    before = apt.tree()
    done = apt.gpunode("toolkit", "install", *argv)
    assert done.code in (1, 2) and message in done.err and "hint: " in done.err
    assert apt.tree() == before and journal(apt) == []


@pytest.mark.full
def test_rollback_leaves_packages_to_their_own_command(apt, repository):
    apt.gpunode("toolkit", "install", *from_mirror(repository))
    before = apt.tree()
    name = journal(apt)[0]["id"]
    done = apt.gpunode("rollback", name)
    assert done.code == 2 and "it changed packages" in done.err
    assert apt.gpunode("rollback").code == 2
    assert (apt.tree(), apt.installed()) == (before, NEWEST)
    assert apt.gpunode("toolkit", "remove").code == 0
    assert apt.installed() == {}


def test_ordinary_user_gets_a_hint_to_use_sudo(apt, repository):
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    user = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
    argv = [*user, *command("toolkit", "install", "--repository", repository.url)]
    probe = subprocess.run([*user, *command("--version")], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("another user may not read this Python environment")
    done = subprocess.run(argv, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "run it again with sudo" in done.stderr


@pytest.mark.full
def test_hold_is_restored_with_the_version(apt, signer, tmp_path):
    mirror = make_repository(tmp_path / "mirror", signer, "1.19.0-1")
    apt.gpunode("toolkit", "install", *from_mirror(mirror), "--hold")
    four(mirror.flat, "1.20.0-1")
    mirror.index()
    (
        mirror.flat / f"libnvidia-container1_1.20.0-1_{architecture()}.deb"
    ).unlink()  # gone since it was indexed
    done = apt.gpunode("toolkit", "install", "--upgrade", "--hold")
    assert done.code == 4 and apt.installed() == OLDER, done.err
    assert all(one["pinned"] for one in apt.json("toolkit", "status")["data"]["packages"])
