"""A layout: every tensor that a set of ranks (or files) holds, as boxes of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from megagent.errors import MegagentError
from megagent.parallel.reshard.boxes import LocalTensor, Region, Shape


@dataclass(frozen=True)
class Layout:
    """One side of a transfer.

    name: for messages ("Megatron tp=4 pp=2"); tensors: rank (or number of a file) -> its tensors.
    """

    name: str
    tensors: Mapping[int, tuple[LocalTensor, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def tensor(self, rank: int, name: str) -> LocalTensor:
        """One tensor of one rank; raises KeyError."""
        return self._by_name[rank][name]

    @cached_property
    def _by_name(self) -> dict[int, dict[str, LocalTensor]]:
        return {rank: {tensor.name: tensor for tensor in tensors} for rank, tensors in self.tensors.items()}

    def problems(self, hf_shapes: Mapping[str, Shape]) -> list[str]:
        """Every fault of a layout that should hold the model of these Hugging Face tensors; empty if there is none.

        Each local element has to come from exactly one place, and each Hugging Face element has to be on some rank.
        """
        found: list[str] = []
        held: dict[str, set[Region]] = {name: set() for name in hf_shapes}
        for rank, tensors in self.tensors.items():
            if len(self._by_name[rank]) != len(tensors):
                found.append(f"{self.name}: rank {rank} holds two tensors of one name")
            for tensor in tensors:
                parts = [Region(box.local_start, box.shape) for box in tensor.boxes]
                if fault := tiling_fault(tensor.shape, [*parts, *tensor.padding]):
                    found.append(f"{self.name}: {tensor.name} on rank {rank} {fault}")
                for box in tensor.boxes:
                    if box.hf not in hf_shapes:
                        found.append(f"{self.name}: {tensor.name} on rank {rank} is made of {box.hf}, which is unknown")
                    elif not tensor.copy:
                        held[box.hf].add(Region(box.hf_start, box.shape))
        for name, regions in held.items():
            if fault := tiling_fault(hf_shapes[name], regions, overlaps=True):
                found.append(f"{self.name}: {name} {fault}")
        return found

    def check(self, hf_shapes: Mapping[str, Shape]) -> None:
        """Raises MegagentError with all `problems`."""
        if problems := self.problems(hf_shapes):
            raise MegagentError("".join(f"\n  {problem}" for problem in problems).strip())


def tiling_fault(shape: Shape, regions: Iterable[Region], overlaps: bool = False) -> str | None:
    """Why the regions do not cover a tensor of this shape, each element exactly once (at least once with `overlaps`).

    None if they do. Near-linear for regions that lie in rows or columns, as those of weights do.
    """
    parts = []
    for region in regions:
        if not region.lies_in(shape):
            return f"has {region.shape} from {region.start} on, which is outside {shape}"
        if all(region.extent):
            parts.append((region.start, region.extent))
    return _fault(shape, parts, 0, overlaps)


def _fault(shape: Shape, parts: list[tuple[Shape, Shape]], axis: int, overlaps: bool) -> str | None:
    if axis == len(shape):
        if len(parts) == 1 or (parts and overlaps):
            return None
        return "has elements that nothing is written to" if not parts else "has elements that are written to twice"
    if shape[axis] == 0:
        return None
    parts = sorted(parts, key=lambda part: part[0][axis])
    cuts = sorted({0, shape[axis]}.union(*((start[axis], start[axis] + size[axis]) for start, size in parts)))
    active: list[tuple[Shape, Shape]] = []
    waiting = 0
    seen: list[tuple[Shape, Shape]] | None = None
    for low in cuts[:-1]:
        active = [part for part in active if part[0][axis] + part[1][axis] > low]
        while waiting < len(parts) and parts[waiting][0][axis] <= low:
            active.append(parts[waiting])
            waiting += 1
        if active == seen:
            continue
        seen = active
        if fault := _fault(shape, active, axis + 1, overlaps):
            return fault
    return None
