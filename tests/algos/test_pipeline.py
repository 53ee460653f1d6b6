"""Aligned rows on simulated pipelines: 1F1B and the interleaved schedule, with the order of Megatron's own.

Every stage runs its list of forwards and backwards in order and waits for what it needs: the activations of the chunk
before, or the gradients of the chunk after. A stage that waits for ever is a hang.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.schedule import ScheduleSizes, aligned_rows, divisors, row_multiple, schedule_problems

Work = tuple[str, int, int]  # forward or backward, micro-batch, chunk of the stage


def stage_order(stage: int, pp: int, vpp: int, group: int, micro_batches: int) -> list[Work]:
    """What a stage does, in order, as megatron.core.pipeline_parallel.schedules has it."""
    table = [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(vpp)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]
    warm_up = pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * group
    warm_up = min(warm_up, len(table))
    forwards: list[Work] = [("forward", *each) for each in table]
    backwards: list[Work] = [("backward", micro_batch, vpp - 1 - chunk) for micro_batch, chunk in table]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(table) - warm_up :]


def needs(work: Work, stage: int, pp: int, vpp: int) -> tuple[int, Work] | None:
    """The stage and its work that must be done before; None for a forward that begins the model."""
    kind, micro_batch, chunk = work
    if kind == "forward":
        if stage > 0:
            return stage - 1, work
        return (pp - 1, ("forward", micro_batch, chunk - 1)) if chunk > 0 else None
    if stage < pp - 1:
        return stage + 1, work
    return (0, ("backward", micro_batch, chunk + 1)) if chunk < vpp - 1 else (stage, ("forward", micro_batch, chunk))


def finishes(pp: int, vpp: int, group: int, micro_batches: int) -> bool:
    orders = [stage_order(stage, pp, vpp, group, micro_batches) for stage in range(pp)]
    done: list[set[Work]] = [set() for _ in range(pp)]
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while len(done[stage]) < len(order):
                work = order[len(done[stage])]
                before = needs(work, stage, pp, vpp)
                if before is not None and before[1] not in done[before[0]]:
                    break
                done[stage].add(work)
                moved = True
    return all(len(ran) == 2 * vpp * micro_batches for ran in done)


def megatron_takes(sizes: ScheduleSizes, micro_batches: int) -> bool:
    """The two conditions under which Megatron's interleaved schedule raises instead of running."""
    if sizes.pp == 1 or sizes.vpp == 1:
        return micro_batches > 0
    group = sizes.micro_batch_multiple
    return sizes.pp <= group <= micro_batches and not 0 < micro_batches % group < sizes.pp


@st.composite
def sizes_that_work(draw: st.DrawFn) -> ScheduleSizes:
    pp, vpp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    group = draw(st.none() | st.integers(pp, pp + 2)) if vpp > 1 else None
    log_prob, reference, actor, critic = (draw(st.integers(1, 4)) for _ in range(4))
    free = ScheduleSizes(dp=dp, pp=pp, vpp=vpp, actor_rows=actor, critic_rows=critic, interleaved_group=group)
    mini_batch = row_multiple(free) * draw(st.integers(1, 2))
    return ScheduleSizes(
        dp=dp, tp=2, pp=pp, vpp=vpp, cp=2, log_prob_rows=log_prob, reference_rows=reference, actor_rows=actor,
        critic_rows=critic, mini_batch_rows=mini_batch, interleaved_group=group,
    )  # fmt: skip


def passes(sizes: ScheduleSizes, rows: int) -> Iterator[int]:
    """Micro-batches on every rank of each pass over so many aligned rows."""
    for log_prob_rows in (sizes.log_prob_rows, sizes.reference_rows):
        assert log_prob_rows is not None
        yield exactly(rows, sizes.dp * log_prob_rows)
    assert sizes.mini_batch_rows is not None
    for _ in range(exactly(rows, sizes.mini_batch_rows)):
        for training_rows in (sizes.actor_rows, sizes.critic_rows):
            assert training_rows is not None
            yield exactly(sizes.mini_batch_rows, sizes.dp * training_rows)


def exactly(value: int, unit: int) -> int:
    assert value % unit == 0, f"{value} rows leave a rank without the micro-batch its peers wait for (unit {unit})"
    return value // unit


@given(sizes=sizes_that_work(), rows=st.integers(0, 200), mode=st.sampled_from(["pad", "copy", "delete"]))
def test_aligned_rows_run_on_every_pipeline_without_a_hang(sizes: ScheduleSizes, rows: int, mode: str) -> None:
    assert schedule_problems(sizes) == []
    aligned = aligned_rows(rows, row_multiple(sizes), mode)
    for micro_batches in {*passes(sizes, aligned)} - {0}:
        assert megatron_takes(sizes, micro_batches)
        group = sizes.micro_batch_multiple if sizes.vpp > 1 else micro_batches
        assert finishes(sizes.pp, sizes.vpp if sizes.pp > 1 else 1, group, micro_batches)


@pytest.mark.parametrize("wrong", [5, 6, 7])
def test_the_simulation_refuses_what_megatron_refuses(wrong: int) -> None:
    assert not megatron_takes(ScheduleSizes(pp=4, vpp=2), wrong)


def test_the_simulation_can_hang() -> None:
    """A group smaller than the pipeline: the first stage wants a micro-batch back that the last has not got yet."""
    assert schedule_problems(ScheduleSizes(pp=4, vpp=2, interleaved_group=2)) != []
    assert finishes(pp=4, vpp=2, group=4, micro_batches=8)
    assert not finishes(pp=4, vpp=2, group=1, micro_batches=8)


@given(sizes=sizes_that_work())
def test_no_smaller_multiple_would_do(sizes: ScheduleSizes) -> None:
    multiple = row_multiple(sizes)
    for smaller in range(1, multiple):
        assert any(smaller % divisor.value for divisor in divisors(sizes))
