"""When regions tile a tensor, and what a layout says of one that does not hold the model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.errors import MegagentError
from megagent.parallel.reshard.boxes import Box, LocalTensor, Region, Shape, whole
from megagent.parallel.reshard.layout import Layout, tiling_fault


@pytest.mark.parametrize(
    ("shape", "regions", "fault"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], None),
        ((4,), [((0,), (2,)), ((3,), (1,))], "nothing is written"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "written to twice"),
        ((4,), [((0,), (5,))], "outside (4,)"),
        ((2, 3), [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 2))], None),
        ((2, 3), [((0, 0), (2, 1)), ((0, 1), (1, 2))], "nothing is written"),
        ((2, 3), [], "nothing is written"),
        ((0, 3), [], None),
        ((), [((), ())], None),
        ((2, 2, 2), [((0, 0, 0), (2, 2)), ((1, 0, 0), (2, 2))], None),  # two matrices of a stack
        ((2, 2, 2), [((0, 0, 0), (2, 2)), ((0, 0, 0), (2, 2))], "written to twice"),
    ],
)
def test_tiles(shape: Shape, regions: list[tuple[Shape, Shape]], fault: str | None) -> None:
    found = tiling_fault(shape, [Region(*region) for region in regions])
    assert found is None if fault is None else fault in str(found)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_tiling_agrees_with_counting_each_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    regions = []
    for _ in range(data.draw(st.integers(0, 5))):
        start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        length = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True))
        regions.append(Region(start, length))
    count = np.zeros(shape, dtype=int)
    for region in regions:
        count[region.slices] += 1
    assert (tiling_fault(shape, regions) is None) == bool((count == 1).all())
    assert (tiling_fault(shape, regions, overlaps=True) is None) == bool((count >= 1).all())


def test_a_layout_names_every_fault() -> None:
    shapes = {"a": (4,), "b": (2,)}
    half = LocalTensor("x", (4,), (Box("a", (0,), (0,), (2,)), Box("c", (0,), (2,), (1,))))
    with pytest.raises(MegagentError) as caught:
        Layout("two ranks", {0: (half,), 1: (whole("b", (2,)), whole("b", (2,)))}).check(shapes)
    assert str(caught.value).split("\n  ") == [
        "two ranks: x on rank 0 has elements that nothing is written to",
        "two ranks: x on rank 0 is made of c, which is unknown",
        "two ranks: rank 1 holds two tensors of one name",
        "two ranks: a has elements that nothing is written to",
    ]


def test_a_copy_alone_does_not_count_as_holding_a_tensor() -> None:
    copy = LocalTensor("output", (2,), (Box("a", (0,), (0,), (2,)),), copy=True)
    assert Layout("a rank", {0: (copy,)}).problems({"a": (2,)})
    assert not Layout("two ranks", {0: (copy,), 1: (whole("a", (2,)),)}).problems({"a": (2,)})
