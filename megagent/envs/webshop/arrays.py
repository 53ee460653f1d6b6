"""A file of named arrays that is mapped, not read: opening it costs the same whatever its size.

    magic     8 bytes
    length    of the header, 8 bytes, little-endian
    checksum  of the header, CRC-32, 4 bytes
    header    JSON: version, meta, the size of the file, and for each array its name, dtype, shape and offset
    arrays    each aligned to 64 bytes, in C order

Every process that maps the file shares its pages with the others, through the page cache.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike

from megagent.errors import CatalogError

Arrays = Mapping[str, np.ndarray]

_MAGIC = b"MEGASHOP"
_VERSION = 1
_PREFIX = struct.Struct("<8sQI")
_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 24  # bytes
_PIECE = 1 << 23  # bytes written at a time
_PLAIN = re.compile(r"[<>|=]?[biufS]\d+")  # dtypes of numbers and bytes: an array of objects would be code


def write_arrays(file: IO[bytes], arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes the arrays and `meta` (what JSON holds) to an empty file, and waits until they are on disk.

    Memory stays bounded where the arrays are mapped themselves.
    """
    header, start = _header(arrays, meta)
    file.write(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)))
    file.write(header)
    for (_, array), (offset, _) in zip(sorted(arrays.items()), _layout(arrays, start), strict=True):
        file.write(bytes(offset - file.tell()))
        for piece in _pieces(array):
            file.write(piece)
    file.flush()
    os.fsync(file.fileno())


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Maps a file of arrays: name -> read-only array, and its meta.

    Raises CatalogError if the file is missing, of another kind or version, cut short or damaged in its header.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(path, file)
            if size != header.get("size"):
                raise _damaged(path, f"it has {size:,} bytes where its header says {header.get('size')}")
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return {entry["name"]: _mapped(mapped, entry) for entry in header["arrays"]}, header["meta"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its header is not that of a catalogue ({error})") from None


class GrowingArray:
    """An array that is appended to: in memory, or in a file of `scratch`, which `finish` maps."""

    def __init__(self, scratch: Path | None, name: str, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._path = (scratch or Path()) / name.replace("/", ".")
        self._file: IO[bytes] = self._path.open("wb") if scratch else io.BytesIO()

    def append(self, values: bytes | np.ndarray) -> None:
        """Adds values of the array's dtype, or the bytes of such values."""
        self._file.write(values if isinstance(values, bytes) else values.astype(self._dtype, copy=False).tobytes())

    def finish(self) -> np.ndarray:
        if isinstance(self._file, io.BytesIO):
            return np.frombuffer(self._file.getbuffer(), self._dtype)
        empty = not self._file.tell()
        self._file.close()
        return np.zeros(0, self._dtype) if empty else np.memmap(self._path, self._dtype, mode="r")


def is_array_file(path: Path) -> bool:
    """Whether a file is one of these, of whatever version."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _read_header(path: Path, file: IO[bytes]) -> dict[str, Any]:
    prefix = file.read(_PREFIX.size)
    if not prefix.startswith(_MAGIC):
        raise CatalogError(f"{path}: not a built catalogue; build one with megagent shop build SRC OUT")
    if len(prefix) < _PREFIX.size:
        raise _damaged(path, "it is cut short")
    _, length, checksum = _PREFIX.unpack(prefix)
    raw = file.read(min(length, _LONGEST_HEADER))
    if len(raw) != length or zlib.crc32(raw) != checksum:
        raise _damaged(path, "its header is cut short or was changed")
    header = json.loads(raw)
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not that of a catalogue")
    if header.get("version") != _VERSION:
        raise CatalogError(
            f"{path}: a catalogue of version {header.get('version')}, and this megagent reads version {_VERSION}; "
            "build it again with megagent shop build SRC OUT --overwrite"
        )
    return header


def _mapped(file: np.ndarray, entry: Mapping[str, Any]) -> np.ndarray:
    if not _PLAIN.fullmatch(entry["dtype"]):
        raise ValueError(f"dtype {entry['dtype']}")
    dtype, shape, offset = np.dtype(entry["dtype"]), tuple(entry["shape"]), entry["offset"]
    return file[offset : offset + dtype.itemsize * prod(shape)].view(dtype).reshape(shape)


def _header(arrays: Arrays, meta: Mapping[str, Any]) -> tuple[bytes, int]:
    """The header, and where the arrays start. Its own length is part of what it says, so it grows until it fits."""
    start = 0
    while True:
        layout = _layout(arrays, start)
        entries = [
            {"name": name, "dtype": array.dtype.str, "shape": array.shape, "offset": offset}
            for (name, array), (offset, _) in zip(sorted(arrays.items()), layout, strict=True)
        ]
        size = layout[-1][1] if layout else start
        header = json.dumps({"version": _VERSION, "size": size, "meta": meta, "arrays": entries}).encode()
        if _PREFIX.size + len(header) <= start:
            return header + b" " * (start - _PREFIX.size - len(header)), start
        start += _ALIGNMENT


def _layout(arrays: Arrays, start: int) -> list[tuple[int, int]]:
    """Where each array begins and ends, by name."""
    places = []
    for _, array in sorted(arrays.items()):
        begin = -(-start // _ALIGNMENT) * _ALIGNMENT
        start = begin + array.nbytes
        places.append((begin, start))
    return places


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array in order. Pages of a mapped file are let go of as soon as they are written."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # A file that is mapped for reading, or by numpy for writing, keeps its content when pages are dropped.
    mapping: Any = None if array.flags.writeable and getattr(array, "mode", "c") == "c" else array
    while mapping is not None and not isinstance(mapping, mmap.mmap):
        mapping = getattr(mapping, "base", None) if isinstance(mapping, np.ndarray) else None
    for start in range(0, len(flat), _PIECE):
        yield flat[start : start + _PIECE].data
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def _damaged(path: Path, how: str) -> CatalogError:
    return CatalogError(f"{path}: the catalogue is damaged, {how}; build it again with megagent shop build SRC OUT")
