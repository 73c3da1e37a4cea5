"""Keys: fingerprints as gpg has them, armour, and what is no key."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.packages.openpgp import armored, binary, fingerprints
from gpunode.packages.repository import desired_repository, facts


def test_the_key_that_is_brought_is_nvidias():
    assert fingerprints(facts().key) == (facts().fingerprint,)
    assert facts().fingerprint == "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
    assert armored(facts().key) == facts().key == desired_repository().key


def test_armour_there_and_back():
    assert armored(binary(facts().key)) == facts().key
    windows = (
        facts()
        .key.replace(b"\n", b"\r\n")
        .replace(b"BLOCK-----\r\n\r\n", b"BLOCK-----\r\nVersion: 1\r\n\r\n")
    )
    assert binary(windows) == binary(facts().key)


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_gpg_reads_the_same(tmp_path):
    (tmp_path / "key").write_bytes(facts().key)
    shown = subprocess.run(
        ["gpg", "--homedir", str(tmp_path), "--show-keys", "--with-colons", str(tmp_path / "key")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert (
        next(line for line in shown.splitlines() if line.startswith("fpr")).split(":")[9]
        == facts().fingerprint
    )


def test_a_key_that_gpg_made_has_one_fingerprint(signer):
    assert len(fingerprints(signer.key)) == 1
    assert fingerprints(binary(signer.key)) == fingerprints(signer.key)


@given(st.binary(max_size=200) | st.integers(0, 2300).map(lambda cut: binary(facts().key)[:cut]))
def test_anything_else_is_refused_in_words(data):
    try:
        found = fingerprints(data)
    except ConfigError as error:
        assert error.hint
    else:
        assert all(len(one) == 40 for one in found)


def test_what_is_far_larger_than_a_key_takes_no_time():
    padding = b"\xd1\xff\x00\x20\x00\x00" + bytes(2 << 20)  # one user attribute; its checksum took seconds
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        desired_repository(key=binary(facts().key) + padding)
