from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from megagent.envs.webshop.arrays import GrowingArray, is_array_file, read_arrays, write_arrays
from megagent.errors import CatalogError

ARRAYS = {
    "a/numbers": np.arange(12, dtype=np.int32).reshape(3, 4),
    "a/texts": np.array([b"x", b"longer"]),
    "b/none": np.zeros(0, np.float64),
    "c/flags": np.array([True, False]),
    "d/one": np.float32(2.5),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.shop"
    with path.open("wb") as stream:
        write_arrays(stream, ARRAYS, {"digest": "abc"})
    return path


def test_what_was_written_is_read(file):
    arrays, meta = read_arrays(file)
    assert meta == {"digest": "abc"}
    assert list(arrays) == sorted(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_mapped_arrays_are_aligned_and_cannot_be_written(file):
    for array in read_arrays(file)[0].values():
        assert array.size == 0 or array.ctypes.data % 64 == 0
        assert not array.flags.writeable


def test_a_mapped_array_is_written_like_any_other(file, tmp_path):
    with (tmp_path / "copy").open("wb") as stream:
        write_arrays(stream, read_arrays(file)[0], {"digest": "abc"})
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("kept", [0, 5, 8, 19, 20, 100, 0.9, 0.999])
def test_a_file_cut_short_anywhere_is_refused(file, kept):
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(CatalogError, match=r"x.shop: (not a built catalogue|the catalogue is damaged)"):
        read_arrays(file)


def test_a_file_that_grew_is_refused(file):
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CatalogError, match="damaged, it has .* bytes where its header says"):
        read_arrays(file)


def test_a_changed_header_is_refused(file):
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    with pytest.raises(CatalogError, match="damaged, its header is cut short or was changed"):
        read_arrays(file)


def with_header(path, header):
    raw = header.encode()
    path.write_bytes(struct.pack("<8sQI", b"MEGASHOP", len(raw), zlib.crc32(raw)) + raw)


def test_another_version_is_told_with_the_way_out(tmp_path):
    with_header(tmp_path / "x.shop", '{"version": 99}')
    with pytest.raises(CatalogError, match="of version 99, and this megagent reads version 1; build it again"):
        read_arrays(tmp_path / "x.shop")


@pytest.mark.parametrize(
    "entry", ['{"name": "a", "dtype": "|O", "shape": [1], "offset": 0}', '{"dtype": "<i4"}', "5", '{"name": "a"}']
)
def test_a_header_that_asks_for_anything_but_numbers_is_refused(tmp_path, entry):
    text = '{"version": 1, "size": SIZE, "meta": {}, "arrays": [' + entry + "]}"
    with_header(tmp_path / "x.shop", text.replace("SIZE", f"{20 + len(text):4}"))
    with pytest.raises(CatalogError, match="its header is not that of a catalogue"):
        read_arrays(tmp_path / "x.shop")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else"])
def test_a_foreign_file_is_refused_and_not_taken_for_a_catalogue(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert not is_array_file(tmp_path / "x")
    with pytest.raises(CatalogError, match="x: not a built catalogue; build one with megagent shop build"):
        read_arrays(tmp_path / "x")


def test_a_missing_file_is_named(tmp_path):
    assert not is_array_file(tmp_path / "x")
    with pytest.raises(CatalogError, match=r"x: cannot be read \(No such file"):
        read_arrays(tmp_path / "x")


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_growing_array_holds_what_was_appended(tmp_path, on_disk):
    growing = GrowingArray(tmp_path if on_disk else None, "a/b", "u4")
    growing.append(np.array([1, 2]))
    growing.append(np.array([3], np.uint32).tobytes())
    np.testing.assert_array_equal(growing.finish(), np.array([1, 2, 3], np.uint32))
    assert bool(list(tmp_path.iterdir())) == on_disk


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_growing_array_may_stay_empty(tmp_path, on_disk):
    assert GrowingArray(tmp_path if on_disk else None, "a", "u4").finish().shape == (0,)
