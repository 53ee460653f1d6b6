"""The rounds of a plan: the order in which all ranks move its copies, a bounded number of bytes at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from megagent.errors import MegagentError
from megagent.parallel.reshard.boxes import Shape
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import BYTES, Copy, Plan

Rounds = tuple[tuple[Copy, ...], ...]


def cut_rounds(plan: Plan, buffer_bytes: int) -> Rounds:
    """Every copy of the plan once. Into each target they go tensor after tensor, a layer's following each other.

    In one round no rank sends another more than buffer_bytes, in the wider of the two dtypes; a larger copy is cut
    along its first axis, and along the next one where a single row is too large. Targets fill their rounds side by
    side, each as many as it needs. All ranks walk through the rounds in this order, so none waits for one that waits
    for it. Raises MegagentError if a buffer cannot hold one element.
    """
    widths = _widths(plan.source), _widths(plan.target)
    largest = max((max(each.values(), default=1) for each in widths), default=1)
    if buffer_bytes < largest:
        raise MegagentError(
            f"buffer_bytes={buffer_bytes}: a buffer of a weight sync holds at least one element of {largest} bytes; "
            "use some megabytes"
        )
    rounds: list[list[Copy]] = []
    number: dict[int, int] = defaultdict(int)  # of the round that a target is filling
    # Bytes in it: target rank -> source rank -> bytes.
    filled: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for copy in plan.copies:
        source_rank, target_rank = copy.source_rank, copy.target_rank
        width = max(widths[0][source_rank, copy.source], widths[1][target_rank, copy.target])
        sent = filled[target_rank]
        for piece, size in _pieces(copy, width, buffer_bytes):
            if sent[source_rank] + size > buffer_bytes:
                number[target_rank] += 1
                sent.clear()
            if number[target_rank] == len(rounds):
                rounds.append([])
            rounds[number[target_rank]].append(piece)
            sent[source_rank] += size
    return tuple(map(tuple, rounds))


def _widths(layout: Layout) -> dict[tuple[int, str], int]:
    """Bytes of an element, by rank and name."""
    return {(rank, tensor.name): BYTES[tensor.dtype] for rank, tensors in layout.tensors.items() for tensor in tensors}


def _pieces(copy: Copy, width: int, most: int) -> Iterator[tuple[Copy, int]]:
    """(a part of the copy, its bytes), none above `most`, in the order of rows."""
    size = math.prod(copy.shape) * width
    if size <= most:
        yield copy, size
        return
    axis = next(number for number, length in enumerate(copy.shape) if length > 1)
    length = copy.shape[axis]
    step = max(1, most // (size // length))
    for start in range(0, length, step):
        shape = (*copy.shape[:axis], min(step, length - start), *copy.shape[axis + 1 :])
        piece = copy._replace(
            source_start=_along(copy.source_start, len(copy.shape), axis, start),
            target_start=_along(copy.target_start, len(copy.shape), axis, start),
            shape=shape,
        )
        yield from _pieces(piece, width, most)


def _along(start: Shape, axes: int, axis: int, offset: int) -> Shape:
    """A start, which may have fixed indices in front of its axes, moved along one of them."""
    position = len(start) - axes + axis
    return (*start[:position], start[position] + offset, *start[position + 1 :])
