"""Megatron's `.metadata`, a pickle: taken apart without making any object of it but records that can do nothing."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megagent.errors import MegagentError
from megagent.parallel.convert.untrusted import check_pickle, is_count, is_shape, open_regular
from megagent.parallel.reshard.boxes import Shape

_LONGEST = 256 << 20  # bytes: a checkpoint of 235 billion parameters and 128 experts a layer has some tens of MB


class Place(NamedTuple):
    """Where a chunk's archive is: `length` bytes of a file from `offset` on."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A part of a tensor. place: None if the metadata does not say it; compressed: how it was transformed."""

    offsets: Shape
    shape: Shape
    place: Place | None
    compressed: str


class Held(NamedTuple):
    """A tensor that the metadata lists. dtype: by torch's name."""

    shape: Shape
    dtype: str
    chunks: tuple[Chunk, ...]


def read(path: Path, skipped: tuple[str, ...]) -> tuple[dict[str, Held], int]:
    """Key -> tensor, and how many tensors there are whose keys begin with what is skipped.

    Raises MegagentError if the file is missing or damaged, or if there is anything else in it.
    """
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _LONGEST:
                raise ValueError(f"it has more than {_LONGEST} bytes")
            data = file.read(_LONGEST)
        check_pickle(data)
        return _tensors(_Reader(io.BytesIO(data)).load(), skipped)
    except FileNotFoundError:
        raise MegagentError(f"{path.parent} has no {path.name}: it is not complete; copy it again") from None
    except Exception as error:  # whatever a damaged pickle leads to; it made records and ran nothing
        raise MegagentError(f"{path} cannot be read ({_reason(error)}); copy the checkpoint again") from None


class _Sealed(type):
    """Classes that a pickle cannot change."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError("it changes a class")


class _Record(metaclass=_Sealed):
    """Stands for an object of the metadata. It keeps what the pickle says of it and has no behaviour at all."""

    __slots__ = ("fields",)
    fields: Any

    def __init__(self, *_: object) -> None:
        self.fields = None

    def __setstate__(self, state: object) -> None:
        self.fields = state


def _record(name: str) -> Any:
    return _Sealed(name, (_Record,), {"__slots__": ()})


_DCP, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_METADATA, _TENSOR, _BYTES = map(_record, ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata"))
_INDEX, _PROPERTIES, _CHUNK = map(_record, ("MetadataIndex", "TensorProperties", "ChunkStorageMetadata"))
_INFO, _OTHER = map(_record, ("StorageInfo", "Other"))
_KNOWN: Mapping[tuple[str, str], Any] = {
    (_DCP, "Metadata"): _METADATA,
    (_DCP, "TensorStorageMetadata"): _TENSOR,
    (_DCP, "BytesStorageMetadata"): _BYTES,
    (_DCP, "MetadataIndex"): _INDEX,
    (_DCP, "TensorProperties"): _PROPERTIES,
    (_DCP, "ChunkStorageMetadata"): _CHUNK,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _INFO,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    # Of no interest here: who saved what, and how a tensor lay in memory.
    (_DCP, "StorageMeta"): _OTHER,
    (_DCP, "_MEM_FORMAT_ENCODING"): _OTHER,
    ("torch.serialization", "_get_layout"): _OTHER,
    **{(_PLANNER, name): _OTHER for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if module.startswith("megatron.core.dist_checkpointing.") and name in ("MCoreSavePlan", "MCoreMetadata"):
            return _OTHER if name == "MCoreSavePlan" else _METADATA
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _tensors(metadata: Any, skipped: tuple[str, ...]) -> tuple[dict[str, Held], int]:
    entries = _field(metadata, _METADATA, "state_dict_metadata", dict)
    if not all(isinstance(key, str) for key in entries):
        raise ValueError("a tensor has no name")
    wanted = {key: entry for key, entry in entries.items() if type(entry) is _TENSOR and not key.startswith(skipped)}
    places = _places(metadata, wanted)
    found: dict[str, Held] = {}
    for key, entry in wanted.items():
        properties = _field(entry, _TENSOR, "properties", _PROPERTIES)
        dtype = properties.fields[0] if isinstance(properties.fields, tuple) and properties.fields else None
        if not isinstance(dtype, str):
            raise ValueError(f"{key} has no dtype")
        chunks = []
        for chunk in _field(entry, _TENSOR, "chunks", list):
            offsets = _shape(chunk, _CHUNK, "offsets")
            place, compressed = places.get((key, offsets), (None, ""))
            chunks.append(Chunk(offsets, _shape(chunk, _CHUNK, "sizes"), place, compressed))
        found[key] = Held(_shape(entry, _TENSOR, "size"), dtype, tuple(chunks))
    tensors = sum(type(entry) is _TENSOR for entry in entries.values())
    return found, tensors - len(found)


def _places(metadata: Any, wanted: Mapping[str, object]) -> dict[tuple[str, Shape], tuple[Place, str]]:
    """(key, offsets) -> where that chunk is, and how it is compressed if it is."""
    found: dict[tuple[str, Shape], tuple[Place, str]] = {}
    for index, info in _field(metadata, _METADATA, "storage_data", dict).items():
        key = _field(index, _INDEX, "fqn", str)
        if key not in wanted:
            continue
        offsets = _shape(index, _INDEX, "offset")
        offset, length = (_field(info, _INFO, name, int) for name in ("offset", "length"))
        if not (is_count(offset) and is_count(length)):
            raise ValueError(f"{key} from {list(offsets)} on is {length} bytes from {offset} on")
        if (key, offsets) in found:
            raise ValueError(f"{key} from {list(offsets)} on is in it twice")
        transforms = info.fields.get("transform_descriptors") or ()
        compressed = ", ".join(map(str, transforms)) if isinstance(transforms, tuple | list) else "in some way"
        found[key, offsets] = Place(_field(info, _INFO, "relative_path", str), offset, length), compressed
    return found


def _field(record: Any, kind: Any, name: str, wanted: Any) -> Any:
    """A field of a record of this kind; raises ValueError if it is anything else."""
    fields = record.fields if type(record) is kind else None
    value = fields.get(name) if isinstance(fields, dict) else None
    if type(value) is not wanted:
        raise ValueError(f"a {kind.__name__} has no sound {name}")
    return value


def _shape(record: Any, kind: Any, name: str) -> Shape:
    value = _field(record, kind, name, tuple)
    if not is_shape(value):
        raise ValueError(f"a {kind.__name__} has no sound {name}")
    return value


def _reason(error: Exception) -> str:
    text = str(error)[:200]
    return text if text.isprintable() and text else type(error).__name__
