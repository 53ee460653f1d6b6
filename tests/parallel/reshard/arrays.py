"""Weights on paper: arrays in which every element is another number, spread over the ranks of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagent.parallel.reshard import hold
from megagent.parallel.reshard.boxes import Shape
from megagent.parallel.reshard.layout import Layout

Arrays = dict[str, NDArray[Any]]
NOTHING = -1  # what no element of a model is
ROOM = 2  # elements of padding have this value where they should not be read


def numbered(shapes: Mapping[str, Shape]) -> Arrays:
    """An array of each shape in which every element is another number, from 1000 on, than all others."""
    full, start = {}, 1000
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        full[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return full


def scattered(layout: Layout, full: Mapping[str, NDArray[Any]], padding: int = 0) -> dict[int, Arrays]:
    """What each rank holds of these Hugging Face tensors, straight from the boxes: the golden way."""
    held = empty(layout)
    for rank, tensors in layout.tensors.items():
        for tensor in tensors:
            for box in tensor.boxes:
                held[rank][tensor.name][box.local_slices] = full[box.hf][box.hf_slices]
            for region in tensor.padding:
                held[rank][tensor.name][region.slices] = padding
    return held


def empty(layout: Layout) -> dict[int, Arrays]:
    return hold.allocate(layout, lambda shape: np.full(shape, NOTHING))


def assert_equal(one: Mapping[int, Arrays], other: Mapping[int, Arrays]) -> None:
    assert one.keys() == other.keys()
    for rank, arrays in one.items():
        assert arrays.keys() == other[rank].keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, other[rank][name], err_msg=f"{name} on rank {rank}")
