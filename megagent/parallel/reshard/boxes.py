"""Boxes: the parts that two tensors share. Integers and names: no torch, no processes, no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """An axis-aligned part of one tensor: `shape` elements from `start` on.

    A start of more axes than the shape has fixed indices in front: (3, 0, 8) and (4, 16) are rows 0-3, columns 8-23 of
    matrix 3 in a stack of matrices.
    """

    start: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[int | slice, ...]:
        """What numpy and torch take as an index; the part that it names has the shape `shape`."""
        fixed = len(self.start) - len(self.shape)
        parts = zip(self.start[fixed:], self.shape, strict=True)
        return (*self.start[:fixed], *(slice(start, start + size) for start, size in parts))

    @property
    def extent(self) -> Shape:
        """The shape with an axis of 1 for each fixed index."""
        return (1,) * (len(self.start) - len(self.shape)) + self.shape

    def lies_in(self, shape: Shape) -> bool:
        """Whether a tensor of this shape has the part."""
        axes = zip(self.start, self.extent, shape, strict=False)
        return len(self.start) == len(shape) and all(0 <= start <= start + size <= end for start, size, end in axes)


@dataclass(frozen=True, slots=True)
class Box:
    """A part that a Hugging Face tensor and a local one share: `shape` elements, there from `hf_start`, here from
    `local_start` on (which may have fixed indices in front, see Region)."""

    hf: str
    hf_start: Shape
    local_start: Shape
    shape: Shape

    @property
    def hf_slices(self) -> tuple[int | slice, ...]:
        return Region(self.hf_start, self.shape).slices

    @property
    def local_slices(self) -> tuple[int | slice, ...]:
        return Region(self.local_start, self.shape).slices


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor of one rank or file: boxes and padding together cover each element exactly once.

    padding: elements that exist nowhere else, zeros. dtype: as safetensors writes it (BF16, F32).
    copy: of a tensor that another rank holds (a tied output layer): written like any other, never read from.
    """

    name: str
    shape: Shape
    boxes: tuple[Box, ...]
    padding: tuple[Region, ...] = ()
    dtype: str = "BF16"
    copy: bool = False

    def renamed(self, name: str, boxes: tuple[Box, ...]) -> LocalTensor:
        return replace(self, name=name, boxes=boxes)


def whole(name: str, shape: Shape, dtype: str = "BF16") -> LocalTensor:
    """A Hugging Face tensor as a file holds it: one box."""
    origin = (0,) * len(shape)
    return LocalTensor(name, shape, (Box(name, origin, origin, shape),), dtype=dtype)
