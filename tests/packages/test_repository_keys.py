"""Keys of repositories: NVIDIA's by its digest, a mirror's as gpg reads it, and both without gpg."""

import hashlib
import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.errors import ConfigError, PreconditionError
from gpunode.host import Host
from gpunode.packages.repository import desired_repository, facts, public_key
from tests.packages.apt_root import Signer

pytestmark = pytest.mark.xdist_group("apt")  # one repository, and one process that forks gpunode
GUIDE = "https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)"
HIDE_GPG = 'mount --bind /dev/null "$(readlink -f "$(command -v gpg)")"\nexec "$@"'
WITHOUT_GPG = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", HIDE_GPG, "sh")
needs_gpg = pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")


def gpg(*argv, data):
    return subprocess.run(["gpg", *argv], input=data, capture_output=True, check=True).stdout


def dearmored(key):
    return gpg("--dearmor", data=key)


def fingerprint(key, home):
    """The primary key's, by gpg."""
    shown = gpg("--homedir", str(home), "--show-keys", "--with-colons", data=key).decode()
    return next(line for line in shown.splitlines() if line.startswith("fpr")).split(":")[9]


@pytest.fixture(params=["with gpg", "without gpg"])
def prefix(request):
    if request.param == "with gpg":
        return ()
    if subprocess.run([*WITHOUT_GPG, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    return WITHOUT_GPG


def install(apt, *argv, prefix=()):
    return apt.gpunode("toolkit", "install", *argv, prefix=prefix)


def key_line(apt, done):
    """The line of a dry run about the key's file; empty if it isn't written."""
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith(f"{apt.key} ")]
    return lines[0].removeprefix(f"{apt.key} ") if lines else ""


def test_bundled_key_is_the_pinned_one():
    assert facts().sha256[0] == hashlib.sha256(facts().key).hexdigest()
    assert desired_repository().key == facts().key
    assert facts().fingerprint == "C95B321B61E88C1809C4F759DDCAE044F796ECB0"


@needs_gpg
def test_pinned_digests_and_fingerprint_agree_with_gpg(tmp_path):
    assert facts().sha256[1] == hashlib.sha256(dearmored(facts().key)).hexdigest()
    assert fingerprint(facts().key, tmp_path) == facts().fingerprint


def test_changed_bundled_key_is_refused(monkeypatch):
    changed = facts()._replace(key=facts().key.replace(b"mQINBFnN", b"mQINBFnO"))
    monkeypatch.setattr("gpunode.packages.repository.facts", lambda: changed)
    with pytest.raises(PreconditionError, match="isn't NVIDIA's"):
        desired_repository()


def test_key_that_the_user_names_is_written_as_text(apt, repository, prefix, tmp_path):
    windows = tmp_path / "windows.asc"
    windows.write_bytes(repository.signer.key.replace(b"\n", b"\r\n"))
    for key in (repository.key, windows):
        mirror = ("--repository", repository.url, "--key", str(key))
        line = key_line(apt, install(apt, *mirror, "--dry-run", prefix=prefix))
        known = "" if prefix else f" {fingerprint(repository.signer.key, tmp_path)}"
        assert line == f"created (dry run): the repository's key{known}"
    done = install(apt, *mirror, prefix=prefix)
    assert done.code == 0, done.err
    assert apt.key.read_bytes() == repository.signer.key
    assert "nothing to do" in install(apt, *mirror, prefix=prefix).out


def test_binary_key_is_written_as_text_by_gpg(apt, repository, prefix, tmp_path):
    binary = tmp_path / "key.gpg"
    binary.write_bytes(dearmored(repository.signer.key))
    done = install(apt, "--repository", repository.url, "--key", str(binary), prefix=prefix)
    if prefix:
        assert done.code == 1 and "a binary key needs gpg" in done.err and "gpg --armor --export" in done.err
        assert not apt.key.exists()
        return
    assert done.code == 0, done.err
    assert apt.key.read_bytes() == repository.signer.key


@needs_gpg
def test_only_the_first_public_key_of_a_file_is_written(apt, repository, prefix, tmp_path):
    key = repository.signer.key
    secret = gpg("--enarmor", data=repository.signer.secret)
    secret = secret.replace(b"PGP ARMORED FILE", b"PGP PRIVATE KEY BLOCK")
    for data in (key + secret, secret + key, b"Our mirror's key:\n\n" + key + facts().key):
        both = tmp_path / "both.asc"
        both.write_bytes(data)
        done = install(apt, "--repository", repository.url, "--key", str(both), prefix=prefix)
        assert done.code == 0, done.err
        assert apt.key.read_bytes() == key


@pytest.mark.parametrize("form", ["armored", "binary"])
def test_nvidias_key_in_an_existing_entry_is_recognized(apt, prefix, form):
    path = apt.root / "nvidia.key"
    path.write_bytes(facts().key if form == "armored" else dearmored(facts().key))
    (apt.sources / "a.list").write_text(f"deb [signed-by={path}] {GUIDE} /\n")
    assert key_line(apt, install(apt, "--dry-run", prefix=prefix)) == ""


def test_entry_with_another_key_is_replaced_by_one_with_nvidias(apt, signer, prefix):
    path = apt.root / "rotated.key"
    path.write_bytes(signer.key)
    (apt.sources / "a.list").write_text(f"deb [signed-by={path}] {GUIDE} /\n")
    status = apt.gpunode("toolkit", "status", prefix=prefix)
    assert status.code == 1 and "a key that is missing or isn't NVIDIA's" in status.out
    done = install(apt, "--dry-run", prefix=prefix)
    assert key_line(apt, done) == f"created (dry run): the repository's key {facts().fingerprint}"
    assert f"{apt.sources}/a.list renamed to " in done.out


def test_keyring_with_nvidias_key_among_others_needs_gpg(apt, signer, prefix):
    path = apt.root / "all.gpg"
    path.write_bytes(dearmored(signer.key) + dearmored(facts().key))
    (apt.sources / "a.list").write_text(f"deb [signed-by={path}] {GUIDE} /\n")
    line = key_line(apt, install(apt, "--dry-run", prefix=prefix))
    assert line.startswith("created") if prefix else line == ""


@pytest.mark.parametrize(
    "script", [pytest.param("sleep 60", marks=pytest.mark.full), "exit 2"]
)  # gpg has half a minute
def test_entry_is_kept_only_where_gpg_does_not_answer(apt, tmp_path, script):
    """A key file that isn't NVIDIA's byte for byte."""
    path = apt.root / "nvidia.key"
    path.write_bytes(facts().key + b"\n")
    (apt.sources / "a.list").write_text(f"deb [arch=amd64 signed-by={path}] {GUIDE} /\n")
    program = tmp_path / "bin/gpg"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    environ = f"PATH={program.parent}:{os.environ['PATH']}"
    line = key_line(apt, install(apt, "--dry-run", prefix=("env", environ)))
    assert (line == "") == script.startswith("sleep")


def test_mirror_that_changed_its_key_is_reported(apt, repository, prefix):
    other = Signer()
    try:
        key = repository.base / "old.asc"
        key.write_bytes(other.key)
        before = apt.tree()
        done = install(apt, "--repository", repository.url, "--key", str(key), prefix=prefix)
    finally:
        other.close()
    assert done.code == 4 and "NO_PUBKEY" in done.err and "--key FILE" in done.err
    assert (apt.tree(), apt.installed()) == (before, {})


@needs_gpg
@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=200) | st.integers(0, 2300).map(lambda cut: dearmored(facts().key)[:cut]))
def test_invalid_key_is_refused_with_a_hint(data):
    try:
        key = public_key(Host(), data)
    except ConfigError as error:
        assert error.hint
    else:
        assert len(key.fingerprint) == 40 and key.content.startswith(b"-----BEGIN PGP PUBLIC KEY BLOCK-----")


@needs_gpg
def test_damaged_and_secret_keys_are_refused(signer):
    armored = signer.key.decode().splitlines(keepends=True)
    armored[3] = armored[3].swapcase()
    for data, message in (
        ("".join(armored).encode(), "the OpenPGP key is damaged: gpg: "),
        (signer.secret, "there is no OpenPGP public key in it"),
    ):
        with pytest.raises(ConfigError, match=message):
            public_key(Host(), data)


def test_oversized_key_is_refused_quickly():
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        public_key(Host(), b"\x99" + bytes(2 << 20))


def test_missing_temporary_directory_is_named(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with pytest.raises(PreconditionError, match="gpg needs a temporary directory: No such file"):
        public_key(Host(), facts().key)


def test_gpg_that_others_can_write_is_not_run(tmp_path):
    program, marker = tmp_path / "bin/gpg", tmp_path / "ran"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o777)
    host = Host(environ={"PATH": str(program.parent)})
    assert public_key(host, facts().key) == (facts().key, "")
    with pytest.raises(ConfigError, match=r"gpg was not run: .* can be written by other users"):
        public_key(host, b"\x99binary")
    assert not marker.exists()
