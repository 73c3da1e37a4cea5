"""Keys: fingerprints equal to gpg's, armor, and invalid keys."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.packages.repository import armored, binary, desired_repository, facts, fingerprints


def test_bundled_key_is_nvidias():
    assert fingerprints(facts().key) == (facts().fingerprint,)
    assert facts().fingerprint == "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
    assert armored(facts().key) == facts().key == desired_repository().key


def test_armor_is_reversible():
    assert armored(binary(facts().key)) == facts().key
    windows = (
        facts()
        .key.replace(b"\n", b"\r\n")
        .replace(b"BLOCK-----\r\n\r\n", b"BLOCK-----\r\nVersion: 1\r\n\r\n")
    )
    assert binary(windows) == binary(facts().key)


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_fingerprints_agree_with_gpg(tmp_path):
    (tmp_path / "key").write_bytes(facts().key)
    shown = subprocess.run(
        ["gpg", "--homedir", str(tmp_path), "--show-keys", "--with-colons", str(tmp_path / "key")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert (
        next(line for line in shown.splitlines() if line.startswith("fpr")).split(":")[9]
        == facts().fingerprint
    )


def test_key_generated_by_gpg_has_one_fingerprint(signer):
    assert len(fingerprints(signer.key)) == 1
    assert fingerprints(binary(signer.key)) == fingerprints(signer.key)


@given(st.binary(max_size=200) | st.integers(0, 2300).map(lambda cut: binary(facts().key)[:cut]))
def test_invalid_key_is_refused_with_a_hint(data):
    try:
        found = fingerprints(data)
    except ConfigError as error:
        assert error.hint
    else:
        assert all(len(one) == 40 for one in found)


def test_oversized_key_is_refused_quickly():
    padding = b"\xd1\xff\x00\x20\x00\x00" + bytes(2 << 20)  # one user attribute; its checksum took seconds
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        desired_repository(key=binary(facts().key) + padding)
