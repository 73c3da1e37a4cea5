import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.facts.libraries import MAGIC, CachedLibrary, build_ld_cache, parse_ld_cache

NAMES = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=30)
LIBRARIES = st.lists(st.builds(lambda name, path: CachedLibrary(name, "/" + path), NAMES, NAMES), max_size=8)
SAMPLE = build_ld_cache((CachedLibrary("libcuda.so.1", "/usr/lib/libcuda.so.1"),) * 3)


@given(libraries=LIBRARIES)
def test_built_cache_parses_to_its_libraries(libraries):
    assert parse_ld_cache(build_ld_cache(tuple(libraries))) == tuple(libraries)


@given(libraries=LIBRARIES)
def test_old_glibc_table_at_the_start_is_skipped(libraries):
    # offsets are relative to the new header, wherever it starts
    old = b"ld.so-1.7.0\0" + struct.pack("<I", 0)
    assert parse_ld_cache(old + build_ld_cache(tuple(libraries))) == tuple(libraries)


@given(data=st.binary(max_size=300))
def test_garbage_gives_only_absolute_paths(data):
    for prefix in (b"", MAGIC):
        assert all(entry.path.startswith("/") for entry in parse_ld_cache(prefix + data))


@given(position=st.integers(0, len(SAMPLE) - 1), value=st.integers(0, 255), cut=st.integers(0, len(SAMPLE)))
def test_damaged_cache_never_raises(position, value, cut):
    damaged = bytearray(SAMPLE)
    damaged[position] = value
    assert len(parse_ld_cache(bytes(damaged[:cut]))) <= 3


def test_entry_count_beyond_the_file_is_limited_to_the_file():
    damaged = SAMPLE[:20] + struct.pack("<I", 0xFFFFFFFF) + SAMPLE[24:]
    assert len(parse_ld_cache(damaged)) <= (len(SAMPLE) - 48) // 24


def test_32_bit_library_is_not_found():
    data = bytearray(SAMPLE)
    struct.pack_into("<i", data, 48, 0x0003)  # FLAG_ELF_LIBC6 alone: i386
    assert len(parse_ld_cache(bytes(data))) == 2


@pytest.mark.skipif(not Path("/etc/ld.so.cache").exists(), reason="no linker cache on this machine")
def test_cache_of_this_machine_contains_its_c_library():
    entries = parse_ld_cache(Path("/etc/ld.so.cache").read_bytes())
    (libc,) = {entry.path for entry in entries if entry.soname == "libc.so.6"}
    assert Path(libc).exists()
