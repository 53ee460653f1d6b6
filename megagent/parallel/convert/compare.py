"""What is in a checkpoint, and whether two hold the same: by Hugging Face tensors, whatever their kind."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from megagent.errors import MegagentError
from megagent.parallel.convert.copying import Block, assemble, blocks, reading
from megagent.parallel.convert.progress import Progress
from megagent.parallel.convert.stored import Extent, Stored
from megagent.parallel.reshard.plan import BYTES

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# Fields of an architecture that follow from its family, and the one that matters only to who starts from nothing.
_NOT_COMPARED = ("tensors", "ties", "init_std")


@dataclass(frozen=True)
class Comparison:
    """differing: a sentence for each tensor whose values differ; rounded: names that are equal but for their dtype."""

    tensors: int
    differing: tuple[str, ...]
    rounded: tuple[str, ...]


def compare(one: Stored, other: Stored, quiet: bool = False) -> Comparison:
    """Every tensor of both, value by value; a tensor in two dtypes is equal if one is the other, cast.

    Raises MegagentError if they are not checkpoints of one architecture.
    """
    named = [field.name for field in fields(one.architecture) if field.name not in _NOT_COMPARED]
    differing = [
        f"{name} is {getattr(one.architecture, name)} and {getattr(other.architecture, name)}"
        for name in named
        if getattr(one.architecture, name) != getattr(other.architecture, name)
    ]
    if differing:
        lines = "".join(f"\n  {line}" for line in differing)
        raise MegagentError(f"{one.folder} and {other.folder} are different models, so nothing was compared:{lines}")
    found, rounded = [], []
    dtypes, dtypes_there = one.dtypes, other.dtypes
    shapes = one.architecture.hf_shapes()
    theirs, ours = _tensors(other, dtypes_there), _tensors(one, dtypes)
    sizes = _sizes(one)
    with Progress("verify", sum(sizes.values()), quiet=quiet) as progress, reading():
        for name in shapes:
            worst, count = _difference(ours[name], theirs[name])
            if count:
                share = f"{count} of {math.prod(shapes[name])} values"
                found.append(f"{name} differs in {share}, by up to {worst:.3g}")
            elif dtypes[name] != dtypes_there[name]:
                rounded.append(name)
            progress.add(sizes[name])
    return Comparison(len(shapes), tuple(found), tuple(rounded))


def digests(stored: Stored, quiet: bool = False) -> dict[str, str]:
    """SHA-256 of every tensor's bytes, by Hugging Face name; the same whatever kind of checkpoint holds them."""
    found = {}
    dtypes = stored.dtypes
    with Progress("digests", sum(_sizes(stored).values()), quiet=quiet) as progress, reading():
        for name, parts in _tensors(stored, dtypes).items():
            digest = hashlib.sha256()
            for block in parts:
                data = assemble(block)
                digest.update(data)
                progress.add(len(data))
            found[name] = digest.hexdigest()
    return found


def digest_of(stored: Stored, of_tensors: Mapping[str, str]) -> str:
    """One hash of all tensors: their names, dtypes, shapes and digests."""
    dtypes, shapes = stored.dtypes, stored.architecture.hf_shapes()
    digest = hashlib.sha256()
    for name in sorted(of_tensors):
        digest.update(f"{name} {dtypes[name]} {list(shapes[name])} {of_tensors[name]}\n".encode())
    return digest.hexdigest()


def describe(stored: Stored) -> Iterator[tuple[str, str]]:
    """What `megagent convert inspect` prints, line for line."""
    architecture = stored.architecture
    counts: dict[str, int] = {}
    shapes = architecture.hf_shapes()
    for name, dtype in stored.dtypes.items():
        counts[dtype] = counts.get(dtype, 0) + math.prod(shapes[name])
    kind = f"{architecture.layers} layers, hidden {architecture.hidden}, {architecture.heads} heads of "
    kind += f"{architecture.head_dim}, {architecture.kv_heads} key/value heads, vocabulary {architecture.vocab}"
    if architecture.experts is not None:
        kind += f", {architecture.experts.count} experts, {architecture.experts.per_token} a token"
    files = {extent.path for extent in stored.extents.values()}
    tensors = sum(len(tensors) for tensors in stored.layout.tensors.values())
    pieces = "chunks" if stored.kind == "Megatron" else "tensors"
    yield "kind", stored.kind
    yield "folder", str(stored.folder)
    yield "family", architecture.family
    yield "sizes", kind
    yield "parameters", f"{stored.parameters:,}"
    yield "tied", "the output layer is the embedding" if architecture.tied else "no"
    yield "dtype", ", ".join(f"{dtype} ({count:,} parameters)" for dtype, count in counts.items())
    yield "layout", f"{tensors} {pieces} in {len(files)} files"
    for note in stored.notes:
        yield "also", note


def _sizes(stored: Stored) -> dict[str, int]:
    """Bytes of every Hugging Face tensor, by name."""
    shapes = stored.architecture.hf_shapes()
    return {name: math.prod(shapes[name]) * BYTES[dtype] for name, dtype in stored.dtypes.items()}


def _tensors(stored: Stored, dtypes: Mapping[str, str]) -> dict[str, list[Block]]:
    """Hugging Face name -> its blocks, in the model's order. Blocks never touch a target: they are only assembled."""
    targets = {(0, name): Extent("", 0, dtypes[name], shape) for name, shape in stored.architecture.hf_shapes().items()}
    return blocks(stored.whole(), stored.extents, targets)


def _difference(one: list[Block], other: list[Block]) -> tuple[float, int]:
    """(largest difference, number of values that differ) of a tensor in two checkpoints."""
    worst, count = 0.0, 0
    pairs = ((_values(a), _values(b)) for a, b in zip(one, other, strict=True))
    for a, b in pairs:
        if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
            continue
        narrow = min(a.dtype, b.dtype, key=lambda dtype: (torch.finfo(dtype).bits, torch.finfo(dtype).eps))
        if a.dtype != b.dtype and torch.equal(_bits(a.to(narrow)), _bits(b.to(narrow))):
            continue
        unequal = _bits(a) != _bits(b) if a.dtype == b.dtype else a.to(narrow) != b.to(narrow)
        apart = (a.double() - b.double())[unequal].abs().nan_to_num(nan=math.inf)  # from what is no number, or endless
        worst, count = max(worst, float(apart.max())), count + int(unequal.sum())
    return worst, count


def _values(block: Block) -> torch.Tensor:
    data = assemble(block)
    return torch.frombuffer(data, dtype=_TORCH_DTYPES[block.dtype]) if data else torch.empty(0)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
