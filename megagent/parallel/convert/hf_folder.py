"""Hugging Face folders: safetensors headers read with distrust, and written before the weights."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagent.errors import MegagentError
from megagent.parallel.convert.stored import DTYPES, Extent, Extents, Stored
from megagent.parallel.convert.untrusted import (
    LONGEST_JSON,
    is_shape,
    open_regular,
    parse_json,
    read_json,
    refuse,
)
from megagent.parallel.convert.writing import write_sparse
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard import files
from megagent.parallel.reshard.boxes import Shape
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import BYTES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What belongs to a model besides its weights: config, tokenizer, generation settings, templates, licence.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
# More layers and experts than this and ten times the tensors that are there: config.json is of no such model.
_MANY_LAYERS = 10_000
Header = dict[str, tuple[str, Shape, int]]  # name -> dtype, shape, offset in the file


def open_folder(folder: Path) -> Stored:
    """A Hugging Face folder, its headers checked and no weight read.

    Raises MegagentError that lists every fault: truncated or corrupt files, an index that lies, tensors that are
    missing, not of the model, misshapen, or no floats.
    """
    hf_config = read_json(folder / "config.json")
    architecture = architecture_of(hf_config)
    faults = companion_faults(folder)
    weight_map = _weight_map(folder, faults)
    names = sorted(set(weight_map.values())) if weight_map is not None else [WEIGHTS]
    read = {name: _header(folder / name, faults) for name in names}
    headers = {name: header or {} for name, header in read.items()}
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header:
            if tensor in holders:
                faults.append(f"{tensor} is in {holders[tensor]} and in {file}")
            holders[tensor] = file
    for tensor, file in (weight_map or {}).items():
        if read[file] is not None and tensor not in headers[file]:
            faults.append(f"{INDEX} says that {tensor} is in {file}, which has no such tensor")
    if weight_map is not None:
        faults += [
            f"{tensor} is in {file} and not in {INDEX}" for tensor, file in holders.items() if tensor not in weight_map
        ]
    found = {tensor: headers[file][tensor] for tensor, file in holders.items()}
    _refuse_absurd(folder, architecture, len(weight_map or found), faults)
    faults += architecture.hf_problems(
        {name: (dtype, shape) for name, (dtype, shape, _) in found.items()}, all_seen=None not in read.values()
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
    for path in _companions(source):
        (folder / path.name).write_bytes(path.read_bytes())
    if dtype is not None:
        config = read_json(folder / "config.json")
        key = "dtype" if "dtype" in config else "torch_dtype"  # transformers renamed it; readers know both
        config[key] = DTYPES[dtype][1]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def companion_faults(folder: Path) -> list[str]:
    """What is wrong with the files that come along: those that cannot be read, and JSON that is none."""
    found = []
    for path in _companions(folder):
        try:
            with open_regular(path) as file:
                if path.suffix == ".json":
                    json.loads(file.read(LONGEST_JSON + 1))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            found.append(f"{path.name} cannot be read ({reason})")
    return found


def _companions(folder: Path) -> list[Path]:
    """The files that come along; among them links that lead nowhere, which are faults and not nothing."""
    found = {path for pattern in _COMPANIONS for path in folder.glob(pattern)}
    return sorted(path for path in found if not path.is_dir() and not path.name.endswith(".index.json"))


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


def _header(path: Path, faults: list[str]) -> Header | None:
    """The header of a safetensors file, None (and a fault noted) if the file is not sound."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
            if not 2 <= length <= min(LONGEST_JSON, size - 8):
                faults.append(f"{path.name} is cut off or no safetensors file ({size} bytes)")
                return None
            content = parse_json(file.read(length))
        content.pop("__metadata__", None)
        found = {name: _entry(name, entry) for name, entry in content.items()}
    except FileNotFoundError:
        faults.append(f"{path.name} is missing")
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        faults.append(f"{path.name} has no readable header ({type(error).__name__}: {error})")
        return None
    position = 0
    for name, (dtype, shape, (begin, end)) in sorted(found.items(), key=lambda item: item[1][2]):
        if dtype in BYTES and end - begin != math.prod(shape) * BYTES[dtype]:
            faults.append(f"{path.name}: {name} has {end - begin} bytes, and {dtype} {list(shape)} needs others")
            return None
        if begin != position or end < begin:
            faults.append(f"{path.name}: the bytes of {name} do not follow those of the tensor before")
            return None
        position = end
    if 8 + length + position != size:
        faults.append(f"{path.name} is {size} bytes and its header speaks of {8 + length + position}: it is cut off")
        return None
    return {name: (dtype, shape, 8 + length + begin) for name, (dtype, shape, (begin, _)) in found.items()}


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[str, Shape, tuple[int, int]]:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and is_shape(shape) and is_shape(offsets) and len(offsets) == 2):
        raise ValueError(f"{name} is {str(entry)[:200]}")
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _refuse_absurd(folder: Path, architecture: Architecture, tensors: int, faults: list[str]) -> None:
    """Before anything is listed by layer: a config.json that lies must not cost memory."""
    layers = architecture.layers * max(1, architecture.expert_count)
    if layers > _MANY_LAYERS + 10 * tensors:
        faults.append(
            f"config.json speaks of {architecture.layers} layers and {architecture.expert_count} experts in each, "
            f"and there are {tensors} tensors"
        )
        refuse(folder, faults)


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
