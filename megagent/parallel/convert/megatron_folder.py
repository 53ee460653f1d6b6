"""Megatron's distributed checkpoints (torch_dist): read as Megatron wrote them, written for any tp, pp and ep to load.

    metadata.json          the format
    common.pt              what is no tensor
    .metadata              which tensors there are, in which chunks, where
    __0_0.distcp, ...      the chunks, each an archive of torch.save
    hf/                    config.json, tokenizer and the like (only megagent writes that)

Megatron stacks the layers (and the experts) of a model: a tensor [hidden] of 4 layers is one tensor [4, hidden].
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from megagent.errors import MegagentError
from megagent.parallel.convert import megatron_metadata
from megagent.parallel.convert.hf_folder import companion_faults
from megagent.parallel.convert.megatron_metadata import Held, Place
from megagent.parallel.convert.stored import Extent, Extents, Stored
from megagent.parallel.convert.torch_record import find, frame
from megagent.parallel.convert.untrusted import open_regular, read_json, refuse
from megagent.parallel.convert.writing import write_sparse
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.models.architecture import FLOATS
from megagent.parallel.models.rows import Row, Rows
from megagent.parallel.reshard.boxes import Box, LocalTensor, Region, Shape
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import BYTES

COMPANIONS = "hf"
TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM
RELEASE = "release"  # what Megatron-LM calls a checkpoint of no training run
_TRAINING_TRACKER = "latest"  # of a training run of this project
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1} | {
    "common_backend": "torch",
    "common_backend_version": 1,
}
_OPTIMIZER = ("optimizer.", "chained_")
_LONGEST_NAME = 100  # bytes of a tracker that are read: a folder named by more cannot be looked for
_MOST_AROUND = 16 << 20  # bytes of an archive that are not its tensor's, and read
_EXTRA = "._extra_state"
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in _TORCH_DTYPES.items()}
# Linear layers of Transformer Engine, and its attention, keep a state of their own; without FP8 it is nothing.
_WITH_EXTRA_STATE = ("linear_qkv", "linear_proj", "core_attention", "linear_fc1", "linear_fc2")


def resolve(folder: Path) -> Path:
    """The checkpoint itself, for a folder that holds several and says which is the newest; else the folder."""
    for tracker in (folder / TRACKER, folder / _TRAINING_TRACKER):
        if tracker.is_file():
            named = tracker.read_bytes()[:_LONGEST_NAME].decode(errors="replace").strip()
            number = named.isascii() and named.isdigit() and tracker.name == TRACKER
            checkpoint = f"iter_{int(named):07d}" if number else named
            if not _is_plain(checkpoint) or not is_megatron(folder / checkpoint):
                if (folder / "config.json").is_file():
                    break  # other trainers leave such a file beside a model
                raise MegagentError(
                    f"{tracker} says that the newest checkpoint is {checkpoint!r}, which is none; give its folder"
                )
            return folder / checkpoint
    return folder


def is_megatron(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() or (folder / ".metadata").is_file()


def open_checkpoint(folder: Path, model: Path | None = None) -> Stored:
    """A distributed checkpoint, its metadata checked and no weight read.

    model: the Hugging Face folder of the same model, for a checkpoint that has no hf/ inside. Raises MegagentError that
    lists every fault: tensors that are missing, unknown or misshapen, chunks that are missing, cut off or damaged.
    """
    companions = model or folder / COMPANIONS
    if not (companions / "config.json").is_file():
        raise MegagentError(
            f"{folder} does not say which model it is (no {COMPANIONS}/config.json); name its Hugging Face folder "
            "with --model"
        )
    hf_config = read_json(companions / "config.json")
    architecture = architecture_of(hf_config)
    backend = read_json(folder / "metadata.json").get("sharded_backend")
    if backend != _FORMAT["sharded_backend"]:
        raise MegagentError(
            f"{folder} is no torch_dist checkpoint (its metadata.json has sharded_backend={str(backend)[:60]}); save "
            "it with --ckpt-format torch_dist"
        )
    listed, ignored = megatron_metadata.read(folder / ".metadata", skipped=_OPTIMIZER)
    faults = companion_faults(companions)
    stacks = {key: stack for stack in _stacks(architecture) for key in stack.keys}
    chunks: list[tuple[LocalTensor, _Source]] = []
    taken: dict[str, str] = {}  # canonical key -> the key that was taken
    for key, held in listed.items():
        stack = stacks.get(key)
        if stack is None:
            faults.append(f"unexpected {key} {list(held.shape)}")
        elif stack.keys[0] not in taken:
            taken[stack.keys[0]] = key
            chunks += _chunks(architecture, stack, key, held, faults)
        elif held != listed[taken[stack.keys[0]]]:
            faults.append(
                f"{key} and {taken[stack.keys[0]]} are names of one tensor, and the metadata tells them apart"
            )
    faults += [
        f"missing {stack.keys[0]} {list(stack.shape)}" for stack in _stacks(architecture) if stack.keys[0] not in taken
    ]
    faults += _shared(chunks)
    extents = _extents(folder, chunks, faults)
    layout = Layout("the Megatron checkpoint", {0: tuple(tensor for tensor, _ in chunks)})
    if not faults:
        faults += layout.problems(architecture.hf_shapes())
    refuse(folder, faults)
    notes = (f"{ignored} tensors of optimizer state",) if ignored else ()
    return Stored("Megatron", folder, companions, hf_config, architecture, layout, extents, notes)


def lay_out(
    folder: Path, architecture: Architecture, dtypes: Mapping[str, str], tp: int, shard_bytes: int
) -> tuple[Layout, Extents, int]:
    """Write everything but the weights into `folder`; the chunks' files have their full size, and zeros for weights.

    dtypes: of the Hugging Face tensors. tp: the vocabulary is padded as for so many tensor-parallel ranks. Returns the
    layout, where each chunk's bytes go, and the bytes of all files. Raises MegagentError if tensors of different dtypes
    belong into one.
    """
    tensors: list[LocalTensor] = []
    extents: dict[tuple[int, str], Extent] = {}
    entries: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}
    files: list[tuple[str, list[tuple[int, bytes]], int]] = []
    faults: list[str] = []
    for stack in _stacks(architecture, tp):
        held = {dtypes[name] for name in stack.hf_names(architecture)}
        if len(held) > 1:
            faults.append(f"{stack.keys[0]} is made of {' and '.join(sorted(held))} tensors; choose one --dtype")
            continue
        dtype = held.pop()
        shape = (*(1 for _ in stack.counts), *stack.rest)
        around = frame(dtype, shape)
        chunks = []
        for numbers in itertools.product(*map(range, stack.counts)):
            if not files or files[-1][2] + around.length > shard_bytes:
                files.append((f"__{len(files)}_0.distcp", [], 0))
            file, parts, start = files[-1]
            parts += [(start, around.head), (start + len(around.head) + around.size, around.tail)]
            files[-1] = (file, parts, start + around.length)
            offsets = (*numbers, *(0 for _ in stack.rest))
            tensor = stack.chunk(architecture, offsets, shape, dtype)
            tensors.append(tensor)
            extents[0, tensor.name] = Extent(str(folder / file), start + len(around.head), dtype, shape)
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
            for key in stack.keys:
                info = filesystem._StorageInfo(file, start, around.length)
                storage[dcp.MetadataIndex(key, torch.Size(offsets))] = info
        properties = dcp.TensorProperties(dtype=_TORCH_DTYPES[dtype])
        for key in stack.keys:
            entries[key] = dcp.TensorStorageMetadata(properties, torch.Size(stack.shape), chunks)
    refuse(folder, faults)
    nothing = _saved([None])
    states = f"__{len(files)}_0.distcp"
    files.append((states, [(0, nothing)], len(nothing)))
    for key in _extra_states(architecture):
        entries[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = filesystem._StorageInfo(states, 0, len(nothing))
    for file, parts, size in files:
        write_sparse(folder / file, parts, size)
    metadata = dcp.Metadata(entries, storage_data=storage, storage_meta=dcp.StorageMeta(), version="1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    common = {
        "iteration": 0,
        "checkpoint_version": 3.0,  # below 2 Megatron-LM would reorder q, k and v
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False},
    }
    (folder / "common.pt").write_bytes(_saved(common))
    (folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")
    return Layout("the Megatron checkpoint", {0: tuple(tensors)}), extents, sum(size for _, _, size in files)


def _saved(content: object) -> bytes:
    """By way of memory: torch tells a full disk from others by no kind of error."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


# --- names and shapes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stack:
    """One stored tensor: a row of the family's table for all layers and experts.

    keys: its names, the first one written by Transformer Engine's layer spec, others by Megatron's own one;
    counts: (layers, experts), or what of them the row has; rest: the shape behind them.
    """

    row: Row
    keys: tuple[str, ...]
    counts: Shape
    rest: Shape

    @property
    def shape(self) -> Shape:
        return self.counts + self.rest

    def hf_names(self, architecture: Architecture) -> Iterator[str]:
        for numbers in itertools.product(*map(range, self.counts)):
            layer, expert = (*numbers, 0, 0)[:2]
            for name in self.row.hf_shapes(architecture):
                yield name.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    def full(self, architecture: Architecture, total: int) -> LocalTensor:
        """The row's tensor where one rank holds all of it, with `total` rows if it is padded."""
        if isinstance(self.row, Rows) and self.row.pads:
            return self.row.of_padded(architecture, total, 0, 1)
        return self.row.local(architecture, 0, 1)

    def chunk(
        self, architecture: Architecture, offsets: Shape, sizes: Shape, dtype: str, total: int | None = None
    ) -> LocalTensor:
        """A part of the stored tensor as boxes; total: its rows, where they are padded otherwise than here."""
        lead = len(self.counts)
        full = self.full(architecture, total if total is not None else self.rest[0])
        window = Region(offsets[lead:], sizes[lead:])
        boxes, padding = [], []
        for numbers in itertools.product(
            *(range(start, start + size) for start, size in zip(offsets, sizes[:lead], strict=False))
        ):
            layer, expert = (*numbers, 0, 0)[:2]
            front = tuple(number - start for number, start in zip(numbers, offsets[:lead], strict=True))
            for box in full.boxes:
                if (cut := _cut(Region(box.local_start, box.shape), window)) is not None:
                    name = box.hf.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                    hf_start = tuple(
                        a + b - c for a, b, c in zip(box.hf_start, cut.start, box.local_start, strict=True)
                    )
                    boxes.append(Box(name, hf_start, front + _minus(cut.start, window.start), cut.shape))
            for region in full.padding:
                if (cut := _cut(region, window)) is not None:
                    padding.append(Region(front + _minus(cut.start, window.start), cut.shape))
        name = f"{self.keys[0]} from {list(offsets)} on"
        return LocalTensor(name, sizes, tuple(boxes), tuple(padding), dtype)


def _cut(region: Region, window: Region) -> Region | None:
    start = tuple(map(max, region.start, window.start))
    stop = tuple(
        min(a + m, b + n) for a, m, b, n in zip(region.start, region.shape, window.start, window.shape, strict=True)
    )
    shape = _minus(stop, start)
    return Region(start, shape) if all(size > 0 for size in shape) else None


def _minus(one: Shape, other: Shape) -> Shape:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _stacks(architecture: Architecture, tp: int = 1) -> list[_Stack]:
    """All stored tensors of a model, in its order."""
    found = []
    for row in architecture.rows:
        if architecture.is_copy(row):
            continue
        counts: Shape = ()
        if "{layer}" in row.names[0]:
            counts += (architecture.layers,)
        if row.of_experts:
            counts += (architecture.expert_count,)
        shape = architecture.part(row.names[0], row, 0, 0, 0, 1).shape
        if isinstance(row, Rows) and row.pads:
            shape = (architecture.padded_vocab(tp), *shape[1:])
        found.append(_Stack(row, _stored_keys(row, architecture), counts, shape))
    return found


def _stored_keys(row: Row, architecture: Architecture) -> tuple[str, ...]:
    names = [
        name.replace("layers.{layer}.", "layers.").replace("local_experts.{expert}.", "experts.") for name in row.names
    ]
    if row.of_experts:
        return (names[0],)  # the grouped layer stores its experts under the names of the list
    if "input_layernorm" in names[0] or "pre_mlp_layernorm" in names[0]:
        # Megatron's own layers store their norms under the names of Transformer Engine's fused ones. Before experts
        # nothing is fused with the norm, and so only they store it like that.
        fused = names[1] if len(names) > 1 else names[0].replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        return (names[0], fused) if architecture.experts and "pre_mlp" in names[0] else (fused,)
    return (names[0],)


def _extra_states(architecture: Architecture) -> list[str]:
    """Keys of the layers' own states, which Megatron asks for when it loads."""
    found = []
    attention = "decoder.layers.self_attention"
    for layer in range(architecture.layers):
        place = f"{_EXTRA}/shard_{layer}_{architecture.layers}"
        found += [f"{attention}.{name}{place}" for name in _WITH_EXTRA_STATE[:3]]
        if architecture.experts is None:
            found += [f"decoder.layers.mlp.{name}{place}" for name in _WITH_EXTRA_STATE[3:]]
        for expert in range(architecture.expert_count):
            place = f"{_EXTRA}/shard_{layer}.{expert}_{architecture.layers}.{architecture.expert_count}"
            found += [f"decoder.layers.mlp.experts.experts.{name}{place}" for name in _WITH_EXTRA_STATE[3:]]
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """A chunk as the metadata has it: where it is, and what it should be."""

    place: Place
    dtype: str
    shape: Shape


def _chunks(
    architecture: Architecture, stack: _Stack, key: str, held: Held, faults: list[str]
) -> list[tuple[LocalTensor, _Source]]:
    size, dtype = held.shape, _DTYPE_NAMES.get(held.dtype)
    lead = len(stack.counts)
    pads = isinstance(stack.row, Rows) and stack.row.pads is not None
    fits = size == stack.shape
    if pads and len(size) == len(stack.shape):
        fits = size[0] >= architecture.vocab and size[1:] == stack.shape[1:]
    if not fits:
        faults.append(f"{key} is {list(size)} and should be {list(stack.shape)}")
        return []
    if dtype is None:
        faults.append(f"{key} is {held.dtype} and should be one of {', '.join(FLOATS)}")
        return []
    found = []
    for offsets, sizes, place, compressed in held.chunks:
        if len(offsets) != len(sizes) or 0 in sizes or not Region(offsets, sizes).lies_in(size):
            faults.append(f"{key} has a chunk {list(sizes)} from {list(offsets)} on, which is no part of {list(size)}")
        elif place is None:
            faults.append(f"{key}: the metadata does not say where its chunk from {list(offsets)} on is")
        elif compressed:
            faults.append(f"{key} is stored compressed ({compressed}); save it without")
        elif place.length < math.prod(sizes) * BYTES[dtype]:
            faults.append(f"{key}: its chunk from {list(offsets)} on has more than the {place.length} bytes there")
        else:
            tensor = stack.chunk(architecture, offsets, sizes, dtype, total=size[lead])
            found.append((tensor, _Source(place, dtype, sizes)))
    return found


def _shared(chunks: list[tuple[LocalTensor, _Source]]) -> list[str]:
    """Faults of chunks that are in one another's bytes."""
    found = []
    ordered = sorted(chunks, key=lambda chunk: chunk[1].place)
    for (before, there), (tensor, source) in itertools.pairwise(ordered):
        if there.place.file == source.place.file and source.place.offset < there.place.offset + there.place.length:
            found.append(f"{source.place.file}: {before.name} and {tensor.name} are said to be in the same bytes")
    return found


def _extents(folder: Path, chunks: list[tuple[LocalTensor, _Source]], faults: list[str]) -> Extents:
    """Where the chunks' bytes are, from the archives that hold them; adds a fault for each that is not as announced."""
    found: dict[tuple[int, str], Extent] = {}
    opened: dict[str, tuple[io.BufferedReader, int] | None] = {}
    try:
        for tensor, (place, dtype, shape) in chunks:
            if place.file not in opened:
                opened[place.file] = _open(folder, place.file, faults)
            file = opened[place.file]
            if file is None:
                continue
            reader, size = file
            if place.offset + place.length > size:
                faults.append(f"{place.file} is cut off ({size} bytes): {tensor.name} ends beyond it")
                continue
            try:
                record = find(io.BufferedReader(_Window(reader.fileno(), place.offset, place.length), 1024))
            except ValueError as error:
                faults.append(f"{place.file}: {tensor.name} is damaged: {error}")
                continue
            if (record.dtype, _long_axes(record.shape)) != (dtype, _long_axes(shape)):
                faults.append(f"{place.file}: {tensor.name} is {record.dtype} {list(record.shape)}, not as announced")
            found[0, tensor.name] = Extent(str(folder / place.file), place.offset + record.offset, dtype, shape)
    finally:
        for file in opened.values():
            if file is not None:
                file[0].close()
    return found


def _long_axes(shape: Shape) -> Shape:
    """Without axes of length 1, which the tensor of one layer or expert may have or not."""
    return tuple(size for size in shape if size != 1)


def _open(folder: Path, name: str, faults: list[str]) -> tuple[io.BufferedReader, int] | None:
    if not _is_plain(name):
        faults.append(f"the metadata names {name!r}, which is outside the folder")
        return None
    try:
        file = open_regular(folder / name)
    except OSError as error:
        faults.append(f"{name}: {error.strerror or error}")
        return None
    return file, os.fstat(file.fileno()).st_size


def _is_plain(name: str) -> bool:
    """Whether this names something in a folder, and not elsewhere."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


class _Window(io.RawIOBase):
    """A part of a file as a file, of which only some MiB are given out: the tensor's bytes are never asked for."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor, self._start, self._size, self._position = descriptor, start, size, 0
        self._left = _MOST_AROUND

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._size - self._position))
        data = os.pread(self._descriptor, wanted, self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        self._left -= len(data)
        if self._left < 0:
            raise OSError(f"there are more than {_MOST_AROUND} bytes around the tensor")
        return len(data)
