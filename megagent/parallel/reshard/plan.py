"""The plan of a transfer: the intersection of two layouts, as copies of slices from rank to rank. Integers only."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
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
        written: dict[tuple[int, str], list[_Extent]] = defaultdict(list)
        sound: set[tuple[Shape, Shape, Shape]] = set()  # layers and experts repeat each other: each case is judged once
        for source_rank, source, source_start, target_rank, target, target_start, shape in self.copies:
            written[target_rank, target].append((target_start, shape))
            try:
                held = self.source.tensor(source_rank, source).shape
            except KeyError:
                found.append(f"{source} is not on rank {source_rank} of {self.source.name}")
                continue
            if (source_start, shape, held) in sound:
                continue
            if Region(source_start, shape).lies_in(held):
                sound.add((source_start, shape, held))
            else:
                found.append(f"{source} on rank {source_rank} is {held}, read at {source_start}")
        for fill in self.fills:
            written[fill.target_rank, fill.target].append((fill.region.start, fill.region.shape))
        faults: dict[tuple[Shape, tuple[_Extent, ...]], str | None] = {}
        for rank, tensors in self.target.tensors.items():
            for tensor in tensors:
                case = tensor.shape, tuple(written.pop((rank, tensor.name), ()))
                if case not in faults:
                    faults[case] = tiling_fault(tensor.shape, (Region(*part) for part in case[1]))
                if faults[case]:
                    found.append(f"{tensor.name} on rank {rank} of {self.target.name} {faults[case]}")
        found += [f"{name} is not on rank {rank} of {self.target.name}" for rank, name in written]
        return found

    def check(self) -> None:
        """Raises MegagentError with the `problems`."""
        _raise(f"the plan from {self.source.name} to {self.target.name}", self.problems())

    def digest(self) -> str:
        """A hash of all copies and fills, of the tensors on both sides and their dtypes: ranks that made the plan for
        themselves compare it before the first byte."""
        digest = hashlib.sha256()
        for layout in (self.source, self.target):
            said: dict[int, bytes] = {}  # replicas share their tensors
            for rank, tensors in layout.tensors.items():
                if id(tensors) not in said:
                    held = [(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors]
                    said[id(tensors)] = hashlib.sha256(repr(held).encode()).digest()
                digest.update(b"%d " % rank + said[id(tensors)])
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


Distance = Callable[[int, int], int]  # (source rank, target rank) -> how far, in any unit


def own_first(source_rank: int, target_rank: int) -> int:
    """Where a rank of the source is the rank of the target with its number (a checkpoint that is laid out anew)."""
    return int(source_rank != target_rank)


class _Holder(NamedTuple):
    """A rank that holds a part of a Hugging Face tensor, and where in its own tensor."""

    rank: int
    tensor: str
    start: Shape


_Extent = tuple[Shape, Shape]  # (start, shape) in a Hugging Face tensor
_Held = dict[_Extent, list[_Holder]]  # the parts of one Hugging Face tensor, and who holds each


def make_plan(source: Layout, target: Layout, cast: bool = False, distance: Distance = own_first) -> Plan:
    """Where each element of the target comes from.

    What several ranks hold is read from the nearest of them, and of those equally near from the one that has least to
    send so far. cast: dtypes may differ. Raises MegagentError that lists what the source lacks and dtypes that differ.
    """
    held, dtypes = _held(source)
    cuts = _Cuts(held)
    choose = _Choice(distance)
    moved = _Moved()
    copies: list[Copy] = []
    fills: list[Fill] = []
    faults: dict[str, None] = {}  # in order, each once
    for rank, tensors in target.tensors.items():
        for tensor in tensors:
            fills += (Fill(rank, tensor.name, region) for region in tensor.padding)
            element = BYTES[tensor.dtype]
            for box in tensor.boxes:
                holders = held.get(box.hf)
                if holders is None:
                    faults[f"{source.name} does not hold {box.hf}"] = None
                    continue
                if not cast and dtypes[box.hf] != tensor.dtype:
                    faults[f"{box.hf} is {dtypes[box.hf]} in {source.name}, {tensor.dtype} in {target.name}"] = None
                cut = cuts.of(box.hf, (box.hf_start, box.shape))
                if not cut.complete:
                    faults[f"{source.name} does not hold all of {box.hf}"] = None
                for shape, elements, whole, in_source, in_target in cut.parts:
                    holder = choose(holders[whole], rank, elements * element)
                    source_start = moved[holder.start, in_source]
                    target_start = moved[box.local_start, in_target]
                    copies.append(
                        Copy(holder.rank, holder.tensor, source_start, rank, tensor.name, target_start, shape)
                    )
    _raise(f"{source.name} -> {target.name}", list(faults))
    return Plan(source, target, tuple(copies), tuple(fills))


def _held(layout: Layout) -> tuple[dict[str, _Held], dict[str, str]]:
    """Hugging Face name -> its parts -> who holds them; and the names' dtypes."""
    held: dict[str, _Held] = {}
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


class _Choice:
    """Who of those who hold a part sends it: of the nearest, the one with the fewest bytes so far."""

    def __init__(self, distance: Distance) -> None:
        self._distance = distance
        self._bytes: dict[int, int] = defaultdict(int)
        self._nearest: dict[tuple[tuple[int, ...], int], list[int]] = {}  # positions among the holders

    def __call__(self, holders: list[_Holder], target_rank: int, size: int) -> _Holder:
        chosen = holders[0]
        if len(holders) > 1:
            ranks = tuple([holder.rank for holder in holders])
            nearest = self._nearest.get((ranks, target_rank))
            if nearest is None:
                far = [self._distance(rank, target_rank) for rank in ranks]
                nearest = [position for position, value in enumerate(far) if value == min(far)]
                self._nearest[ranks, target_rank] = nearest
            chosen = holders[min(nearest, key=lambda position: self._bytes[ranks[position]])]
        self._bytes[chosen.rank] += size
        return chosen


class _Moved(dict[tuple[Shape, Shape], Shape]):
    """(a start in a local tensor, which may have fixed indices in front; an offset) -> the start moved by the offset.

    Remembered, because layers and experts repeat each other.
    """

    def __missing__(self, key: tuple[Shape, Shape]) -> Shape:
        start, offset = key
        fixed = len(start) - len(offset)
        self[key] = found = (*start[:fixed], *(a + b for a, b in zip(start[fixed:], offset, strict=True)))
        return found


class _Part(NamedTuple):
    """What an extent and a part that the source holds have in common."""

    shape: Shape
    elements: int
    whole: _Extent  # the part
    in_source: Shape  # offset in it
    in_target: Shape  # offset in the extent


class _Cut(NamedTuple):
    parts: tuple[_Part, ...]
    complete: bool  # whether they cover the extent


class _Cuts:
    """How extents of Hugging Face tensors are made of the source's parts. Tensors that the source cuts alike, as the
    same one of every layer and expert, share their cuts."""

    def __init__(self, held: dict[str, _Held]) -> None:
        self._held = held
        self._alike: dict[tuple[_Extent, ...], tuple[_Index, dict[_Extent, _Cut]]] = {}
        self._of: dict[str, tuple[_Index, dict[_Extent, _Cut]]] = {}

    def of(self, name: str, extent: _Extent) -> _Cut:
        known = self._of.get(name)
        if known is None:
            extents = tuple(self._held[name])
            if extents not in self._alike:
                self._alike[extents] = _Index(list(extents)), {}
            known = self._of[name] = self._alike[extents]
        index, cuts = known
        cut = cuts.get(extent)
        if cut is None:
            cut = cuts[extent] = _cut(index, extent)
        return cut


def _cut(index: _Index, extent: _Extent) -> _Cut:
    parts = tuple(
        _Part(shape, math.prod(shape), whole, _difference(start, whole[0]), _difference(start, extent[0]))
        for (start, shape), whole in index.cut(extent)
    )
    return _Cut(parts, sum(part.elements for part in parts) == math.prod(extent[1]))


def _difference(one: Shape, other: Shape) -> Shape:
    return tuple(a - b for a, b in zip(one, other, strict=True))


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
