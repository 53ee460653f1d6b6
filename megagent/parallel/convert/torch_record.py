"""What holds one tensor in a Megatron checkpoint: a zip archive by torch.save, with a pickle and the tensor's bytes.

Here the archive is made around bytes that come later, and taken apart without making any object but a description.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megagent.parallel.convert.untrusted import check_pickle, is_count, is_shape
from megagent.parallel.reshard.boxes import Shape
from megagent.parallel.reshard.plan import BYTES

_ALIGNMENT = 64  # of the bytes, as torch has it
_NAME = "archive"
_STORAGES = {
    "BF16": torch.BFloat16Storage,
    "F16": torch.HalfStorage,
    "F32": torch.FloatStorage,
    "F64": torch.DoubleStorage,
}
_DTYPE_OF = {storage.__name__: dtype for dtype, storage in _STORAGES.items()}
# sizes and offset of a zip64 archive; the plain fields say that they are there
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ZIP64_LOCAL = struct.Struct("<HHQQ")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ZIP64_CENTRAL = struct.Struct("<HHQQQ")
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_MAX32 = 0xFFFFFFFF
_DESCRIPTOR_FOLLOWS = 8  # a flag of an entry: its sizes stand behind its bytes, as torch writes them
_LONGEST_DESCRIPTOR = 24
_LONGEST_DESCRIPTION = 1 << 20


class Frame(NamedTuple):
    """What stands before and after a tensor's `size` bytes."""

    head: bytes
    size: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.size + len(self.tail)


class Found(NamedTuple):
    """A tensor in a record: its bytes start at `offset` of it."""

    dtype: str
    shape: Shape
    offset: int


@lru_cache(maxsize=1024)
def frame(dtype: str, shape: Shape) -> Frame:
    """The archive around a contiguous tensor that torch.load reads.

    Its bytes have no CRC (torch neither computes nor looks at it with torch.serialization.set_crc32_options(False)).
    """
    size = math.prod(shape) * BYTES[dtype]
    before = [
        ("data.pkl", _pickled(dtype, shape)),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
    ]
    head, central = b"", []
    for name, data in before:
        central.append(_entry(name, len(data), zlib.crc32(data), len(head)))
        head += _local(name, len(data), zlib.crc32(data)) + data
    central.append(_entry("data/0", size, 0, len(head)))
    plain = len(head) + len(_local("data/0", size, 0))
    head += _local("data/0", size, 0, padding=-plain % _ALIGNMENT)
    end = len(head) + size
    version = b"3\n"
    tail = _local("version", len(version), zlib.crc32(version)) + version
    central.append(_entry("version", len(version), zlib.crc32(version), end))
    directory = b"".join(central)
    start = end + len(tail)
    tail += directory
    tail += _ZIP64_END.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, len(central), len(central), len(directory), start)
    tail += _ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, start + len(directory), 1)
    tail += _END.pack(
        b"PK\x05\x06", 0, 0, len(central), len(central), min(len(directory), _MAX32), min(start, _MAX32), 0
    )
    return Frame(head, size, tail)


def find(record: io.BufferedIOBase) -> Found:
    """Where the tensor lies in a record. Raises ValueError (what is wrong with it) if it holds no contiguous tensor.

    Everything that says so has to agree: the directory of the archive, the entry's own header, what follows the bytes,
    and the description of the tensor.
    """
    try:
        return _find(record)
    except ValueError:
        raise
    except Exception as error:  # whatever a damaged archive leads to; nothing in it was run
        raise ValueError(f"it is no archive of torch ({type(error).__name__})") from None


def _find(record: io.BufferedIOBase) -> Found:
    with zipfile.ZipFile(record) as archive:
        infos = archive.infolist()
        entries = {info.filename.partition("/")[2]: info for info in infos}
        if len(entries) < len(infos):
            raise ValueError("its archive has two entries of one name")
        order = entries.get("byteorder")
        if order is not None and _small(archive, order) != b"little":
            raise ValueError("its bytes are not little-endian")
        stored = _unpickled(_small(archive, entries["data.pkl"]))
        data = entries[f"data/{stored.key}"]
        ends = [info.header_offset for info in infos if info.header_offset > data.header_offset]
        start = _start(record, data, min(ends, default=archive.start_dir))
    item = BYTES[stored.dtype]
    if data.file_size != stored.size * item or stored.start + math.prod(stored.shape) > stored.size:
        raise ValueError("it holds fewer or more bytes than its tensor has")
    return Found(stored.dtype, stored.shape, start + stored.start * item)


def _small(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """What an entry holds, its CRC checked."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > _LONGEST_DESCRIPTION:
        raise ValueError("it is a compressed or damaged archive")
    return archive.read(info)


def _start(record: io.BufferedIOBase, data: zipfile.ZipInfo, end: int) -> int:
    """Where the bytes of an entry begin that has everything up to `end`."""
    record.seek(data.header_offset)
    header = _LOCAL.unpack(record.read(_LOCAL.size))
    name = record.read(header[9])
    start = data.header_offset + _LOCAL.size + header[9] + header[10]
    stop = start + data.file_size
    described = bool(header[2] & _DESCRIPTOR_FOLLOWS)
    record.seek(stop)
    after = record.read(end - stop) if 0 <= end - stop <= _LONGEST_DESCRIPTOR else b"?"
    sound = (
        header[0] == b"PK\x03\x04"
        and (header[2], header[3], data.compress_type) == (data.flag_bits, zipfile.ZIP_STORED, zipfile.ZIP_STORED)
        and name == data.orig_filename.encode()
        and data.file_size == data.compress_size
        and (after[:4] == b"PK\x07\x08" if described else not after)
    )
    if not sound:
        raise ValueError("it is a compressed or damaged archive")
    return start


# --- pickle ----------------------------------------------------------------------------------------------------------


class _Storage(NamedTuple):
    dtype: str
    key: str
    size: int


class _View(NamedTuple):
    """What _rebuild_tensor_v2 would make a tensor of."""

    dtype: str
    key: str
    size: int  # of the storage
    start: int
    shape: Shape


class _Rebuilt:
    """Pickles as a tensor does."""

    def __init__(self, dtype: str, shape: Shape) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        storage = _Reference(self.dtype, math.prod(self.shape))
        hooks: OrderedDict[str, Any] = OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(self.shape), strides, False, hooks)


class _Reference:
    def __init__(self, dtype: str, size: int) -> None:
        self.dtype, self.size = dtype, size


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", _STORAGES[obj.dtype], "0", "cpu", obj.size) if isinstance(obj, _Reference) else None


class _Unpickler(pickle.Unpickler):
    """Knows a tensor's constructor, and does not call even that."""

    def find_class(self, module: str, name: str) -> Any:
        # A pickle can set attributes of what it is given: each one gets a function of its own.
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *parts: _view(*parts)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda view, *_: view
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name in _DTYPE_OF:
            return _DTYPE_OF[name]
        raise ValueError(f"it holds a {module}.{name}, which is no tensor of floats")

    def persistent_load(self, reference: Any) -> _Storage:
        kind, dtype, key, _, size = reference
        if kind != "storage" or dtype not in BYTES or not isinstance(key, str) or not is_count(size):
            raise ValueError("it refers to something that is no storage")
        return _Storage(dtype, key, size)


def _view(storage: Any, start: Any, shape: Any, strides: Any, *_: Any) -> _View:
    if not (isinstance(storage, _Storage) and is_count(start) and is_shape(shape) and is_shape(strides)):
        raise ValueError("its description makes no sense")
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError("its tensor is not contiguous")
        expected *= size
    return _View(storage.dtype, storage.key, storage.size, start, tuple(shape))


def _pickled(dtype: str, shape: Shape) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Rebuilt(dtype, shape))
    return buffer.getvalue()


@lru_cache(maxsize=1024)
def _unpickled(data: bytes) -> _View:
    try:
        check_pickle(data)
        view = _Unpickler(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise ValueError(f"its description cannot be read ({type(error).__name__})") from None
    if not isinstance(view, _View):
        raise ValueError("it holds no tensor")
    return view


# --- zip -------------------------------------------------------------------------------------------------------------


def _local(name: str, size: int, crc: int, padding: int = 0) -> bytes:
    encoded = f"{_NAME}/{name}".encode()
    extra = _ZIP64_LOCAL.pack(1, 16, size, size)
    if padding:
        # A field of an unknown kind, as torch pads; it has a header of 4 bytes of its own.
        padding += _ALIGNMENT if padding < 4 else 0
        extra += struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
    header = _LOCAL.pack(b"PK\x03\x04", 45, 0, 0, 0, 0, crc, _MAX32, _MAX32, len(encoded), len(extra))
    return header + encoded + extra


def _entry(name: str, size: int, crc: int, offset: int) -> bytes:
    encoded = f"{_NAME}/{name}".encode()
    extra = _ZIP64_CENTRAL.pack(1, 24, size, size, offset)
    sizes = (_MAX32, _MAX32, len(encoded), len(extra), 0, 0, 0, 0, _MAX32)
    return _CENTRAL.pack(b"PK\x01\x02", 45, 45, 0, 0, 0, 0, crc, *sizes) + encoded + extra
