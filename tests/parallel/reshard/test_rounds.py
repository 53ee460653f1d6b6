"""Rounds of a plan: each copy once, within the buffer, in an order that lets a target finish tensor after tensor."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.errors import MegagentError
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture
from megagent.parallel.reshard import hold, megatron, vllm
from megagent.parallel.reshard.boxes import Region, whole
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import Copy, Plan, make_plan
from megagent.parallel.reshard.rounds import cut_rounds
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import tiny
from tests.parallel.reshard.arrays import ROOM, assert_equal, empty, numbered, scattered
from tests.parallel.reshard.random_models import placed_models

WIDER = 4  # bytes of an element: from F32 to BF16


@st.composite
def plans(draw: st.DrawFn) -> tuple[Architecture, Plan]:
    model, degrees = draw(placed_models())
    candidates = [
        Workers(tp, pp, engines, expert_parallel)
        for tp in (1, 2, 4)
        for pp in (1, 2)
        for engines in (1, 2)
        for expert_parallel in (False, model.experts is not None)
    ]
    workers = draw(st.sampled_from([each for each in candidates if not each.problems(model)]))
    source, target = megatron.layout(model, degrees, "F32"), vllm.layout(model, workers, "BF16")
    return model, make_plan(source, target, cast=True)


@settings(deadline=None, max_examples=30)
@given(plans(), st.integers(WIDER, 600))
def test_rounds_move_what_the_plan_moves_and_never_more_than_a_buffer_between_two_ranks(
    made: tuple[Architecture, Plan], buffer_bytes: int
) -> None:
    model, plan = made
    rounds = cut_rounds(plan, buffer_bytes)
    assert all(rounds)
    for copies in rounds:
        between: Counter[tuple[int, int]] = Counter()
        for copy in copies:
            between[copy.source_rank, copy.target_rank] += math.prod(copy.shape) * WIDER
        assert max(between.values()) <= buffer_bytes
    # Their copies are a plan of the same transfer: complete, each element once, and to the same end.
    cut = dataclasses.replace(plan, copies=tuple(copy for copies in rounds for copy in copies))
    full = numbered(model.hf_shapes())
    held = empty(plan.target)
    hold.execute(cut, scattered(plan.source, full, padding=ROOM), held)
    assert_equal(held, scattered(plan.target, full))


@settings(deadline=None, max_examples=30)
@given(plans(), st.integers(WIDER, 600))
def test_a_target_finishes_one_tensor_before_the_next_begins(
    made: tuple[Architecture, Plan], buffer_bytes: int
) -> None:
    _, plan = made
    order = {rank: [tensor.name for tensor in tensors] for rank, tensors in plan.target.tensors.items()}
    last = dict.fromkeys(order, 0)
    for copies in cut_rounds(plan, buffer_bytes):
        for copy in copies:
            number = order[copy.target_rank].index(copy.target)
            assert number >= last[copy.target_rank]
            last[copy.target_rank] = number


def one_rank(*shape: int) -> Layout:
    return Layout("a rank", {0: (whole("a", shape),)})


def cut(shape: tuple[int, ...], buffer_bytes: int) -> list[list[tuple[Any, Any]]]:
    plan = make_plan(one_rank(*shape), one_rank(*shape))
    return [[(copy.target_start, copy.shape) for copy in copies] for copies in cut_rounds(plan, buffer_bytes)]


def test_a_large_copy_is_cut_into_rows_and_a_large_row_into_parts() -> None:
    assert cut((5, 2), 8) == [[((0, 0), (2, 2))], [((2, 0), (2, 2))], [((4, 0), (1, 2))]]
    assert cut((2, 3), 4) == [
        [((0, 0), (1, 2))],
        [((0, 2), (1, 1))],
        [((1, 0), (1, 2))],
        [((1, 2), (1, 1))],
    ]


def test_a_piece_of_one_matrix_in_a_stack_stays_in_that_matrix() -> None:
    source = one_rank(4, 2)
    copy = Copy(0, "a", (1, 0), 0, "a", (7, 1, 0), (2, 2))
    (first,), (second,) = cut_rounds(Plan(source, source, (copy,), ()), 4)
    assert (first.source_start, first.target_start, first.shape) == ((1, 0), (7, 1, 0), (1, 2))
    assert (second.source_start, second.target_start, second.shape) == ((2, 0), (7, 2, 0), (1, 2))
    assert Region(second.target_start, second.shape).lies_in((8, 3, 2))


def test_targets_fill_their_rounds_side_by_side() -> None:
    """A large tensor of one worker holds up no other."""
    model = tiny("qwen2")
    plan = make_plan(megatron.layout(model, Degrees(pp=2)), vllm.layout(model, Workers(pp=2)))
    rounds = cut_rounds(plan, 256)
    assert {copy.target_rank for copy in rounds[0]} == {0, 1}
    largest = max(plan.traffic.values())
    assert len(rounds) < 2 * largest / 256


def test_a_buffer_that_holds_no_element_is_refused() -> None:
    with pytest.raises(MegagentError, match="buffer_bytes=1: .* at least one element of 2 bytes"):
        cut((2, 2), 1)
