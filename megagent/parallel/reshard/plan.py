"""The plan of a transfer: the intersection of two layouts, as copies of slices from rank to rank. Integers only."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megagent.errors import MegagentError
from megagent.parallel.reshard.boxes import Region, Shape
from megagent.parallel.reshard.layout import Layout, tiling_fault

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SHOWN = 20  # faults that an error lists


class Copy(NamedTuple):
    """`shape` elements of tensor `source` on rank `source_rank` become those of `target` on rank `target_rank`.

    A start may have fixed indices in front of the shape's axes, see Region.
    """

    source_rank: int
    source: str
    source_start: Shape
    target_rank: int
    target: str
    target_start: Shape
    shape: Shape

    @property
    def source_slices(self) -> tuple[int | slice, ...]:
        return Region(self.source_start, self.shape).slices

    @property
    def target_slices(self) -> tuple[int | slice, ...]:
        return Region(self.target_start, self.shape).slices


class Fill(NamedTuple):
    """Padding: these elements of `target` on rank `target_rank` become zero."""

    target_rank: int
    target: str
    region: Region


@dataclass(frozen=True)
class Plan:
    """What to copy where. Copies and fills are in the order of the target's ranks and tensors."""

    source: Layout
    target: Layout
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]

    def problems(self) -> list[str]:
        """Every fault, found without trust in how the plan was made; empty if there is none.

        Each element of the target is written exactly once, from elements that are there, in the same dtype unless the
        plan casts from one kind of float to another.
        """
        found = []
        written: dict[tuple[int, str], list[Region]] = defaultdict(list)
        for copy in self.copies:
            written[copy.target_rank, copy.target].append(Region(copy.target_start, copy.shape))
            try:
                held = self.source.tensor(copy.source_rank, copy.source)
            except KeyError:
                found.append(f"{copy.source} is not on rank {copy.source_rank} of {self.source.name}")
                continue
            if not Region(copy.source_start, copy.shape).lies_in(held.shape):
                found.append(f"{copy.source} on rank {copy.source_rank} is {held.shape}, read at {copy.source_start}")
        for fill in self.fills:
            written[fill.target_rank, fill.target].append(fill.region)
        for rank, tensors in self.target.tensors.items():
            for tensor in tensors:
                if fault := tiling_fault(tensor.shape, written.pop((rank, tensor.name), [])):
                    found.append(f"{tensor.name} on rank {rank} of {self.target.name} {fault}")
        found += [f"{name} is not on rank {rank} of {self.target.name}" for rank, name in written]
        return found

    def check(self) -> None:
        """Raises MegagentError with the `problems`."""
        _raise(f"the plan from {self.source.name} to {self.target.name}", self.problems())

    def digest(self) -> str:
        """A hash of all copies and fills: ranks that made the plan for themselves compare it before the first byte."""
        digest = hashlib.sha256()
        for step in (*self.copies, *self.fills):
            digest.update(repr(step).encode())
        return digest.hexdigest()

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> bytes, in the target's dtype."""
        sizes = {
            (rank, tensor.name): BYTES[tensor.dtype]
            for rank, tensors in self.target.tensors.items()
            for tensor in tensors
        }
        found: dict[tuple[int, int], int] = defaultdict(int)
        for copy in self.copies:
            found[copy.source_rank, copy.target_rank] += math.prod(copy.shape) * sizes[copy.target_rank, copy.target]
        return dict(found)

    def sends(self, rank: int) -> Iterator[Copy]:
        """The copies out of a rank of the source, in an order that `receives` agrees with."""
        return (copy for copy in self.copies if copy.source_rank == rank)

    def receives(self, rank: int) -> Iterator[Copy]:
        """The copies into a rank of the target."""
        return (copy for copy in self.copies if copy.target_rank == rank)


class _Holder(NamedTuple):
    """A rank that holds a part of a Hugging Face tensor, and where in its own tensor."""

    rank: int
    tensor: str
    start: Shape


_Extent = tuple[Shape, Shape]  # (start, shape) in a Hugging Face tensor


def make_plan(source: Layout, target: Layout, cast: bool = False) -> Plan:
    """Where each element of the target comes from.

    What several ranks hold is read from the target's own rank if that is one of them, else from them in turns. cast:
    dtypes may differ. Raises MegagentError that lists what the source lacks and dtypes that differ.
    """
    held, dtypes = _held(source)
    indices: dict[str, _Index] = {}
    pieces: dict[tuple[str, _Extent], list[tuple[_Extent, _Extent]]] = {}
    copies: list[Copy] = []
    fills: list[Fill] = []
    faults: dict[str, None] = {}  # in order, each once
    for rank, tensors in target.tensors.items():
        for tensor in tensors:
            fills += (Fill(rank, tensor.name, region) for region in tensor.padding)
            for box in tensor.boxes:
                holders = held.get(box.hf)
                if holders is None:
                    faults[f"{source.name} does not hold {box.hf}"] = None
                    continue
                if not cast and dtypes[box.hf] != tensor.dtype:
                    faults[f"{box.hf} is {dtypes[box.hf]} in {source.name}, {tensor.dtype} in {target.name}"] = None
                extent = (box.hf_start, box.shape)
                parts = pieces.get((box.hf, extent))
                if parts is None:
                    if box.hf not in indices:
                        indices[box.hf] = _Index(list(holders))
                    parts = pieces[box.hf, extent] = list(indices[box.hf].cut(extent))
                    if sum(math.prod(part[1]) for part, _ in parts) != math.prod(box.shape):
                        faults[f"{source.name} does not hold all of {box.hf}"] = None
                for (start, shape), whole in parts:
                    holder = _choose(holders[whole], rank)
                    source_start = _moved(holder.start, start, whole[0])
                    target_start = _moved(box.local_start, start, box.hf_start)
                    copies.append(
                        Copy(holder.rank, holder.tensor, source_start, rank, tensor.name, target_start, shape)
                    )
    _raise(f"{source.name} -> {target.name}", list(faults))
    return Plan(source, target, tuple(copies), tuple(fills))


def _held(layout: Layout) -> tuple[dict[str, dict[_Extent, list[_Holder]]], dict[str, str]]:
    """Hugging Face name -> its parts -> who holds them; and the names' dtypes."""
    held: dict[str, dict[_Extent, list[_Holder]]] = {}
    dtypes: dict[str, str] = {}
    for rank, tensors in layout.tensors.items():
        for tensor in tensors:
            if tensor.copy:
                continue
            for box in tensor.boxes:
                dtypes[box.hf] = tensor.dtype
                parts = held.setdefault(box.hf, {})
                parts.setdefault((box.hf_start, box.shape), []).append(_Holder(rank, tensor.name, box.local_start))
    return held, dtypes


def _choose(holders: list[_Holder], rank: int) -> _Holder:
    if len(holders) == 1:
        return holders[0]
    return next((holder for holder in holders if holder.rank == rank), holders[rank % len(holders)])


def _moved(local: Shape, start: Shape, origin: Shape) -> Shape:
    """`start`, a position in a Hugging Face tensor, in the local tensor that has `origin` of it at `local`."""
    fixed = len(local) - len(start)
    return (*local[:fixed], *(a + b - c for a, b, c in zip(local[fixed:], start, origin, strict=True)))


class _Index:
    """The parts of one Hugging Face tensor, for finding those that an extent meets."""

    def __init__(self, extents: list[_Extent]) -> None:
        axes = range(len(extents[0][0]))
        # Parts lie in rows or in columns: along the axis with most starts few of them meet an extent.
        axis = max(axes, key=lambda axis: len({start[axis] for start, _ in extents}), default=None)
        if axis is not None:
            extents = sorted(extents, key=lambda extent: (extent[0][axis], extent))
            self.starts = [start[axis] for start, _ in extents]
            # Highest end of this part and those before it: never falls, so it can be searched.
            self.ends = list(accumulate((start[axis] + shape[axis] for start, shape in extents), max))
        self.axis, self.extents = axis, extents

    def cut(self, extent: _Extent) -> Iterator[tuple[_Extent, _Extent]]:
        """(the part's share of the extent, the part) for parts that meet it; shares do not overlap."""
        low, high = 0, len(self.extents)
        if self.axis is not None:
            start, size = extent[0][self.axis], extent[1][self.axis]
            low, high = bisect_right(self.ends, start), bisect_left(self.starts, start + size)
        left = [extent]
        for part in self.extents[low:high]:
            rest: list[_Extent] = []
            for piece in left:
                shared = _intersection(piece, part)
                if shared is None:
                    rest.append(piece)
                else:
                    yield shared, part
                    rest += _without(piece, shared)
            left = rest
            if not left:
                return


def _intersection(one: _Extent, other: _Extent) -> _Extent | None:
    start, shape = [], []
    for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True):
        low, high = max(a, b), min(a + m, b + n)
        if low >= high:
            return None
        start.append(low)
        shape.append(high - low)
    return tuple(start), tuple(shape)


def _without(whole: _Extent, hole: _Extent) -> list[_Extent]:
    """What is left of an extent without a part of it, in at most two pieces for each axis."""
    found = []
    start, shape = list(whole[0]), list(whole[1])
    for axis, (low, size) in enumerate(zip(*hole, strict=True)):
        before, after = low - start[axis], start[axis] + shape[axis] - (low + size)
        for position, length in ((start[axis], before), (low + size, after)):
            if length:
                found.append(
                    (
                        (*start[:axis], position, *start[axis + 1 :]),
                        (*shape[:axis], length, *shape[axis + 1 :]),
                    )
                )
        start[axis], shape[axis] = low, size
    return found


def _raise(what: str, faults: list[str]) -> None:
    if faults:
        shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise MegagentError(f"{what} is not possible:{shown}{more}")
