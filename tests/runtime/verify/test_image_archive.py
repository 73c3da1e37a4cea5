"""Layers and archives are the same bytes for the same input, and contain that input."""

import io
import json
import tarfile

from hypothesis import given
from hypothesis import strategies as st

from gpunode.runtime.verify.image import ImageConfig, LayerEntry, archive, layer, sha256

NAMES = st.text("abc", min_size=1, max_size=3)
TREES = st.dictionaries(
    st.tuples(NAMES, NAMES).map(lambda parts: "/f" + "/".join(parts)), st.binary(max_size=64)
)
CONFIG = ImageConfig("amd64", ("/bin/python",), ("-m", "x"), {"A": "1"})


def read(tar: tarfile.TarFile, name: str) -> bytes:
    stream = tar.extractfile(name)
    assert stream is not None
    return stream.read()


@given(TREES)
def test_layer_contains_every_file_after_its_parents(files):
    content = layer({path: LayerEntry(data, mode=0o644) for path, data in files.items()})
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = tar.getmembers()
        held = {f"/{m.name}": read(tar, m.name) for m in members if m.isfile()}
    assert held == files
    names = [member.name for member in members]
    assert names == sorted(names)
    assert all(name.rpartition("/")[0] in ("", *names) for name in names)


@given(TREES)
def test_archive_is_independent_of_order_and_time(files):
    entries = {path: LayerEntry(data) for path, data in files.items()}
    assert layer(entries) == layer(dict(reversed(entries.items())))


def test_links_and_modes_are_kept_and_root_owns_all_files():
    content = layer({"/lib": LayerEntry(target="usr/lib"), "/tmp": LayerEntry(mode=0o1777)})
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        link, directory = tar.getmembers()
    assert (link.issym(), link.linkname) == (True, "usr/lib")
    assert (directory.isdir(), directory.mode) == (True, 0o1777)
    assert {(m.uid, m.gid, m.mtime) for m in (link, directory)} == {(0, 0, 0)}


def test_archive_names_its_layer_by_digest():
    content = layer({"/a": LayerEntry(b"x")})
    with tarfile.open(fileobj=io.BytesIO(archive("gpunode.local/x:1", content, CONFIG))) as tar:
        (manifest,) = json.loads(read(tar, "manifest.json"))
        config = json.loads(read(tar, manifest["Config"]))
        held = read(tar, manifest["Layers"][0])
    assert manifest["RepoTags"] == ["gpunode.local/x:1"]
    assert held == content
    assert config["rootfs"]["diff_ids"] == [f"sha256:{sha256(content)}"]
    assert config["config"]["Entrypoint"] == ["/bin/python"]
    assert config["config"]["Env"] == ["A=1"]
