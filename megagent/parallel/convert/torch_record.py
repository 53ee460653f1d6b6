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
    """Where the tensor lies in a record. Raises ValueError (what is wrong with it) if it holds no contiguous tensor."""
    try:
        with zipfile.ZipFile(record) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            order = entries.get("byteorder")
            if order is not None and archive.read(order) != b"little":
                raise ValueError("its bytes are not little-endian")
            stored = _unpickled(archive.read(entries["data.pkl"]))
            data = entries[f"data/{stored.key}"]
            record.seek(data.header_offset)
            header = _LOCAL.unpack(record.read(_LOCAL.size))
    except (zipfile.BadZipFile, struct.error, KeyError, EOFError, NotImplementedError) as error:
        raise ValueError(f"it is no archive of torch ({type(error).__name__})") from None
    if header[0] != b"PK\x03\x04" or data.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is a compressed or damaged archive")
    start = data.header_offset + _LOCAL.size + header[9] + header[10]
    item = BYTES[stored.dtype]
    if data.file_size < (stored.start + math.prod(stored.shape)) * item:
        raise ValueError("it holds fewer bytes than its tensor has")
    return Found(stored.dtype, stored.shape, start + stored.start * item)


# --- pickle ----------------------------------------------------------------------------------------------------------


class _Storage(NamedTuple):
    dtype: str
    key: str
    size: int


class _View(NamedTuple):
    """What _rebuild_tensor_v2 would make a tensor of."""

    dtype: str
    key: str
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
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")):
            return _view if name == "_rebuild_tensor_v2" else lambda view, *_: view
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name in _DTYPE_OF:
            return _DTYPE_OF[name]
        raise ValueError(f"it holds a {module}.{name}, which is no tensor of floats")

    def persistent_load(self, reference: Any) -> _Storage:
        kind, dtype, key, _, size = reference
        if kind != "storage" or dtype not in BYTES:
            raise ValueError("it refers to something that is no storage")
        return _Storage(dtype, str(key), int(size))


def _view(storage: _Storage, start: int, shape: Any, strides: Any, *_: Any) -> _View:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError("its tensor is not contiguous")
        expected *= size
    return _View(storage.dtype, storage.key, int(start), tuple(map(int, shape)))


def _pickled(dtype: str, shape: Shape) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Rebuilt(dtype, shape))
    return buffer.getvalue()


@lru_cache(maxsize=1024)
def _unpickled(data: bytes) -> _View:
    try:
        view = _Unpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, TypeError, IndexError, AttributeError, EOFError) as error:
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
