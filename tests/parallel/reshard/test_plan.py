"""Plans between any two layouts: each element once, from the right place; and what a faulty plan or source is told."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.errors import MegagentError
from megagent.parallel.degrees import Degrees
from megagent.parallel.reshard import files, hold, megatron, vllm
from megagent.parallel.reshard import plan as plan_module
from megagent.parallel.reshard.boxes import Box, LocalTensor, Region, Shape, whole
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import Copy, Plan, make_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import tiny
from tests.parallel.reshard.arrays import ROOM, assert_equal, empty, numbered, scattered


def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces of a random cut."""
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    bounds = [0, *sorted(inner), size]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


@st.composite
def layouts(draw: st.DrawFn, shapes: dict[str, Shape], name: str) -> Layout:
    """Tensors cut into a grid, cells held by one or two ranks, stacked there in any order, with room around them.

    A second grid of another cut may be held besides, so that a source has parts that overlap.
    """
    ranks = draw(st.integers(1, 4))
    tensors: dict[int, list[LocalTensor]] = {rank: [] for rank in range(ranks)}
    for hf, shape in shapes.items():
        for grid in range(draw(st.integers(1, 2))):
            rows = cuts(draw, shape[0])
            columns = cuts(draw, shape[1]) if len(shape) > 1 else [(0, 1)]
            for column, (left, width) in enumerate(columns):
                rest, rest_start = ((width,), (left,)) if len(shape) > 1 else ((), ())
                stacks: dict[int, list[tuple[int, int]]] = {}
                for cell in rows:
                    for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)):
                        stacks.setdefault(rank, []).append(cell)
                for rank, cells in stacks.items():
                    room, stacked = draw(st.integers(0, 2)), draw(st.booleans())
                    front = (draw(st.integers(0, 1)),) if stacked else ()
                    zeros = (0,) * len(rest)
                    position, boxes = room, []
                    for start, height in draw(st.permutations(cells)):
                        local = (*front, position, *zeros)
                        boxes.append(Box(hf, (start, *rest_start), local, (height, *rest)))
                        position += height
                    padding = [Region((*front, 0, *zeros), (room, *rest))] if room else []
                    if stacked:  # the other of two matrices is padding
                        padding.append(Region((1 - front[0], 0, *zeros), (position, *rest)))
                    whole_shape = (*((2,) if stacked else ()), position, *rest)
                    tensors[rank].append(
                        LocalTensor(f"{hf}.{grid}.{column}", whole_shape, tuple(boxes), tuple(padding))
                    )
    return Layout(name, {rank: tuple(held) for rank, held in tensors.items()})


@st.composite
def transfers(draw: st.DrawFn) -> tuple[dict[str, Shape], Layout, Layout]:
    sizes = st.lists(st.integers(1, 6), min_size=1, max_size=2)
    shapes = {f"tensor{number}": tuple(draw(sizes)) for number in range(draw(st.integers(1, 3)))}
    return shapes, draw(layouts(shapes, "source")), draw(layouts(shapes, "target"))


@settings(deadline=None, max_examples=100)
@given(transfers())
def test_every_element_of_the_target_is_written_exactly_once_and_from_the_right_source_element(
    transfer: tuple[dict[str, Shape], Layout, Layout],
) -> None:
    shapes, source, target = transfer
    source.check(shapes)
    target.check(shapes)
    full = numbered(shapes)
    plan = make_plan(source, target)
    plan.check()
    written = hold.allocate(target, lambda shape: np.zeros(shape, dtype=int))
    for copy in plan.copies:
        written[copy.target_rank][copy.target][copy.target_slices] += 1
    for fill in plan.fills:
        written[fill.target_rank][fill.target][fill.region.slices] += 1
    assert all((count == 1).all() for counts in written.values() for count in counts.values())
    held = empty(target)
    # What lies in the source's padding is another number than zero: it must not be read.
    hold.execute(plan, scattered(source, full, padding=ROOM), held)
    assert_equal(held, scattered(target, full))


@settings(deadline=None, max_examples=50)
@given(transfers())
def test_a_plan_and_its_inverse_compose_to_the_identity(transfer: tuple[dict[str, Shape], Layout, Layout]) -> None:
    shapes, source, target = transfer
    before = scattered(source, numbered(shapes))
    there, back = empty(target), empty(source)
    hold.execute(make_plan(source, target), before, there)
    hold.execute(make_plan(target, source), there, back)
    assert_equal(back, before)


@settings(deadline=None, max_examples=50)
@given(transfers(), st.data())
def test_a_plan_that_lacks_or_doubles_a_copy_is_refused(
    transfer: tuple[dict[str, Shape], Layout, Layout], data: st.DataObject
) -> None:
    _, source, target = transfer
    plan = make_plan(source, target)
    number = data.draw(st.integers(0, len(plan.copies) - 1))
    less = dataclasses.replace(plan, copies=plan.copies[:number] + plan.copies[number + 1 :])
    more = dataclasses.replace(plan, copies=(*plan.copies, plan.copies[number]))
    for faulty, words in ((less, "nothing is written to"), (more, "written to twice")):
        with pytest.raises(MegagentError, match=words):
            faulty.check()
        assert faulty.digest() != plan.digest()


def one_rank(*tensors: LocalTensor, name: str = "a rank") -> Layout:
    return Layout(name, {0: tensors})


@pytest.mark.parametrize(
    ("copy", "words"),
    [
        (Copy(1, "a", (0,), 0, "a", (0,), (4,)), "a is not on rank 1 of source"),
        (Copy(0, "b", (0,), 0, "a", (0,), (4,)), "b is not on rank 0 of source"),
        (Copy(0, "a", (1,), 0, "a", (0,), (4,)), r"a on rank 0 is \(4,\), read at \(1,\)"),
        (Copy(0, "a", (0,), 0, "a", (2,), (4,)), r"which is outside \(4,\)"),
        (Copy(0, "a", (0,), 0, "b", (0,), (4,)), "b is not on rank 0 of target"),
    ],
)
def test_a_copy_from_or_to_what_is_not_there_is_refused(copy: Copy, words: str) -> None:
    layout = one_rank(whole("a", (4,)))
    source, target = dataclasses.replace(layout, name="source"), dataclasses.replace(layout, name="target")
    with pytest.raises(MegagentError, match=words):
        Plan(source, target, (copy,), ()).check()


def test_everything_that_the_source_lacks_is_named_at_once() -> None:
    """A tensor that a checkpoint does not have is never passed over."""
    target = one_rank(whole("a", (4,)), whole("b", (2,)), whole("c", (2,)), name="target")
    source = one_rank(
        LocalTensor("a", (3,), (Box("a", (0,), (0,), (3,)),)), whole("c", (2,), dtype="F32"), name="source"
    )
    with pytest.raises(MegagentError) as caught:
        make_plan(source, target)
    assert str(caught.value).split("\n  ") == [
        "source -> target is not possible:",
        "source does not hold all of a",
        "source does not hold b",
        "c is F32 in source, BF16 in target",
    ]


def test_dtypes_may_differ_where_a_cast_is_wanted() -> None:
    make_plan(one_rank(whole("a", (4,), dtype="F32")), one_rank(whole("a", (4,))), cast=True).check()


def test_a_rank_reads_from_itself_if_it_can_and_else_from_the_replicas_in_turns() -> None:
    held = (whole("a", (4,)),)
    source = Layout("source", dict.fromkeys(range(2), held))
    target = Layout("target", dict.fromkeys(range(6), held))
    plan = make_plan(source, target)
    assert [copy.source_rank for copy in plan.copies] == [0, 1, 0, 1, 0, 1]
    assert plan.traffic == {(rank % 2, rank): 8 for rank in range(6)}
    assert [copy.target_rank for copy in plan.sends(1)] == [1, 3, 5]
    assert [copy.source_rank for copy in plan.receives(5)] == [1]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=4),
)
def test_replicas_share_the_load_and_none_is_asked_where_one_is_nearer(
    sizes: list[int], source_places: list[tuple[int, int]], target_places: list[tuple[int, int]]
) -> None:
    """Places are (node, GPU). All ranks hold the same tensors."""
    held = tuple(whole(f"tensor{number}", (size,)) for number, size in enumerate(sizes))
    source = Layout("source", dict.fromkeys(range(len(source_places)), held))
    target = Layout("target", dict.fromkeys(range(len(target_places)), held))

    def distance(one: int, other: int) -> int:
        here, there = source_places[one], target_places[other]
        return 0 if here == there else 1 if here[0] == there[0] else 2

    plan = make_plan(source, target, distance=distance)
    plan.check()
    groups: dict[tuple[int, ...], Counter[int]] = {}  # the nearest ranks of a target -> bytes that each sends it
    for copy in plan.copies:
        far = [distance(rank, copy.target_rank) for rank in range(len(source_places))]
        assert far[copy.source_rank] == min(far)
        nearest = tuple(rank for rank, value in enumerate(far) if value == min(far))
        groups.setdefault(nearest, Counter(dict.fromkeys(nearest, 0)))[copy.source_rank] += 2 * copy.shape[0]
    if len(groups) == 1:  # else one group's load may rest on ranks of another
        (sent,) = groups.values()
        assert max(sent.values()) - min(sent.values()) <= 2 * max(sizes)


def test_engines_on_their_own_node_read_from_all_replicas_alike() -> None:
    model, workers = tiny("qwen2", vocab_size=64), Workers(tp=2)
    source = megatron.layout(model, Degrees(tp=2, dp=4))
    plan = make_plan(source, vllm.layout(model, workers), distance=lambda source_rank, target_rank: 2)
    sent: Counter[int] = Counter()
    for (rank, _), size in plan.traffic.items():
        sent[rank] += size
    largest = max(2 * math.prod(copy.shape) for copy in plan.copies)
    for tp_rank in range(2):  # what only they have
        replicas = [sent[rank] for rank in range(8) if rank % 2 == tp_rank]
        assert max(replicas) - min(replicas) <= largest


def test_layers_and_experts_that_repeat_each_other_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So hundreds of thousands of copies are planned in seconds."""
    cuts: list[str] = []
    cut = plan_module._cut
    monkeypatch.setattr(plan_module, "_cut", lambda *arguments: cuts.append("") or cut(*arguments))
    counts = []
    for layers, experts in ((2, 4), (5, 8)):
        model = tiny("qwen3_moe", num_hidden_layers=layers, num_experts=experts, vocab_size=64)
        make_plan(megatron.layout(model, Degrees(tp=2, ep=2, etp=1)), vllm.layout(model, Workers(tp=2)))
        counts.append(len(cuts))
        cuts.clear()
    assert counts[0] == counts[1] < 40


def test_a_tied_copy_is_written_and_never_read() -> None:
    copy = LocalTensor("output", (2,), (Box("a", (0,), (0,), (2,)),), copy=True)
    layout = Layout("ranks", {0: (whole("a", (2,)),), 1: (copy,)})
    assert [step.source for step in make_plan(layout, one_rank(whole("a", (2,)))).copies] == ["a"]
    assert [step.target for step in make_plan(one_rank(whole("a", (2,))), layout).copies] == ["a", "output"]
    with pytest.raises(MegagentError, match="does not hold a"):
        make_plan(one_rank(copy), layout)


def test_ranks_that_plan_for_themselves_have_the_same_digest() -> None:
    layout = files.layout([{"a": ("BF16", (4, 2))}])
    assert make_plan(layout, layout).digest() == make_plan(layout, layout).digest()
    other = files.layout([{"a": ("BF16", (2, 4))}])
    assert make_plan(layout, layout).digest() != make_plan(other, other).digest()
