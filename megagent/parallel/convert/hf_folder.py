"""Hugging Face folders: safetensors headers read with distrust, and written before the weights."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagent.errors import MegagentError
from megagent.parallel.convert.stored import DTYPES, Extent, Extents, Stored
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard import files
from megagent.parallel.reshard.boxes import Shape
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import BYTES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What belongs to a model besides its weights: config, tokenizer, generation settings, templates, licence.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_LONGEST_HEADER = 100_000_000  # as the safetensors library has it
_SHOWN = 40
Header = dict[str, tuple[str, Shape, int]]  # name -> dtype, shape, offset in the file


def open_folder(folder: Path) -> Stored:
    """A Hugging Face folder, its headers checked and no weight read.

    Raises MegagentError that lists every fault: truncated or corrupt files, an index that lies, tensors that are
    missing, not of the model, misshapen, or no floats.
    """
    hf_config = read_json(folder / "config.json")
    architecture = architecture_of(hf_config)
    faults: list[str] = []
    weight_map = _weight_map(folder, faults)
    names = sorted(set(weight_map.values())) if weight_map is not None else [WEIGHTS]
    headers = {name: _header(folder / name, faults) for name in names}
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header:
            if tensor in holders:
                faults.append(f"{tensor} is in {holders[tensor]} and in {file}")
            holders[tensor] = file
    for tensor, file in (weight_map or {}).items():
        if headers[file] and tensor not in headers[file]:
            faults.append(f"{INDEX} says that {tensor} is in {file}, which has no such tensor")
    if weight_map is not None:
        faults += [
            f"{tensor} is in {file} and not in {INDEX}" for tensor, file in holders.items() if tensor not in weight_map
        ]
    found = {tensor: headers[file][tensor] for tensor, file in holders.items()}
    faults += architecture.hf_problems(
        {name: (dtype, shape) for name, (dtype, shape, _) in found.items()}, all_seen=all(headers.values())
    )
    copies = [name for name in architecture.tied_hf_names() if name in holders]
    if not faults:
        for copy in copies:
            original = architecture.tied_hf_names()[copy]
            if not _same(folder / holders[copy], found[copy], folder / holders[original], found[original]):
                faults.append(f"{copy} differs from {original}, and config.json ties them")
    refuse(folder, faults)
    layout = files.layout(
        [{name: found[name][:2] for name in header if name not in copies} for header in headers.values()]
    )
    extents = {
        (number, name): Extent(str(folder / file), found[name][2], *found[name][:2])
        for number, (file, header) in enumerate(headers.items())
        for name in header
        if name not in copies
    }
    notes = tuple(f"{copy} is stored too, equal to its tie" for copy in copies)
    return Stored("Hugging Face", folder, folder, hf_config, architecture, layout, extents, notes)


def lay_out(
    folder: Path, shapes: Mapping[str, Shape], dtypes: Mapping[str, str], shard_bytes: int
) -> tuple[Layout, Extents, int]:
    """Write headers and index for these tensors into `folder`; the files have their full size, and zeros for weights.

    Returns the layout, where each tensor's bytes go, and the bytes of all files.
    """
    headers = files.sharded(shapes, dtypes, shard_bytes)
    count = len(headers)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    extents: dict[tuple[int, str], Extent] = {}
    total = weights = 0
    for number, (file, header) in enumerate(zip(names, headers, strict=True)):
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, (dtype, shape) in header.items():
            size = math.prod(shape) * BYTES[dtype]
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
            position += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        start = 8 + len(text)
        for name, (dtype, shape) in header.items():
            offset = start + entries[name]["data_offsets"][0]
            extents[number, name] = Extent(str(folder / file), offset, dtype, shape)
        write_sparse(folder / file, [(0, struct.pack("<Q", len(text)) + text)], start + position)
        total += start + position
        weights += position
    if count > 1:
        weight_map = {name: file for file, header in zip(names, headers, strict=True) for name in header}
        index = {"metadata": {"total_size": weights}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files.layout(headers), extents, total


def copy_companions(source: Path, folder: Path, dtype: str | None) -> None:
    """config.json, tokenizer and the like: everything of a model's folder but its weights.

    dtype: of DTYPES, what config.json shall say; None: what it says.
    """
    for path in sorted({path for pattern in _COMPANIONS for path in source.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    if dtype is not None:
        config = read_json(folder / "config.json")
        key = "dtype" if "dtype" in config else "torch_dtype"  # transformers renamed it; readers know both
        config[key] = DTYPES[dtype][1]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_sparse(path: Path, parts: Sequence[tuple[int, bytes]], size: int) -> None:
    """A file of `size` bytes with these at their offsets, zeros elsewhere. One that is there keeps its other bytes."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, size)
        for offset, data in parts:
            os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Raises MegagentError if the file is not there or holds no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MegagentError(f"{path.parent} has no {path.name}; give the folder of a model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise MegagentError(f"{path} cannot be read ({error}); download or export it again") from None
    if not isinstance(content, dict):
        raise MegagentError(f"{path} holds no JSON object; download or export it again")
    return content


def refuse(folder: Path, faults: Sequence[str]) -> None:
    """Raises MegagentError that lists the faults of a checkpoint, if there are any."""
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        noun = "fault" if len(faults) == 1 else "faults"
        raise MegagentError(f"{folder}: {len(faults)} {noun}; take a complete copy of one model:{lines}{more}")


def _weight_map(folder: Path, faults: list[str]) -> dict[str, str] | None:
    """Tensor -> file as the index says, None if one file holds all."""
    path = folder / INDEX
    if not path.exists():
        if not (folder / WEIGHTS).exists():
            others = ", ".join(sorted(each.name for each in folder.glob("*.safetensors"))) or "no safetensors file"
            raise MegagentError(
                f"{folder} has neither {WEIGHTS} nor {INDEX} ({others}); download or export the model again"
            )
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise MegagentError(f"{path} has no weight_map of tensors to files; download or export the model again")
    if (folder / WEIGHTS).exists() and WEIGHTS not in weight_map.values():
        # Of the two transformers reads the one file, and vLLM the index.
        faults.append(f"there is a {WEIGHTS} that {INDEX} does not name; remove what is not of this model")
    outside = {file for file in weight_map.values() if Path(file).name != file or file in ("", "..")}
    faults += [f"{INDEX} names {file!r}, which is outside the folder" for file in sorted(outside)]
    if outside:
        refuse(folder, faults)
    return weight_map


def _header(path: Path, faults: list[str]) -> Header:
    """The header of a safetensors file, empty (and a fault noted) if the file is not sound."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                faults.append(f"{path.name} is cut off or no safetensors file ({size} bytes)")
                return {}
            content = json.loads(file.read(length))
        content.pop("__metadata__", None)
        found = {str(name): _entry(entry) for name, entry in content.items()}
    except FileNotFoundError:
        faults.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        faults.append(f"{path.name} has no readable header ({type(error).__name__}: {error})")
        return {}
    position = 0
    for name, (dtype, shape, (begin, end)) in sorted(found.items(), key=lambda item: item[1][2]):
        if dtype in BYTES and end - begin != math.prod(shape) * BYTES[dtype]:
            faults.append(f"{path.name}: {name} has {end - begin} bytes, and {dtype} {list(shape)} needs others")
            return {}
        if begin != position or end < begin:
            faults.append(f"{path.name}: the bytes of {name} do not follow those of the tensor before")
            return {}
        position = end
    if 8 + length + position != size:
        faults.append(f"{path.name} is {size} bytes and its header speaks of {8 + length + position}: it is cut off")
        return {}
    return {name: (dtype, shape, 8 + length + begin) for name, (dtype, shape, (begin, _)) in found.items()}


def _entry(entry: Mapping[str, Any]) -> tuple[str, Shape, tuple[int, int]]:
    begin, end = map(int, entry["data_offsets"])
    return str(entry["dtype"]), tuple(map(int, entry["shape"])), (begin, end)


def _same(
    one: Path, held: tuple[str, Shape, int], other: Path, held_there: tuple[str, Shape, int], step: int = 16 << 20
) -> bool:
    if held[0] != held_there[0]:
        return False
    left = math.prod(held[1]) * BYTES[held[0]]
    with open(one, "rb") as first, open(other, "rb") as second:
        first.seek(held[2])
        second.seek(held_there[2])
        while left:
            count = min(step, left)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True
