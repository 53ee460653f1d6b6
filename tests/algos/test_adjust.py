from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.adjust import align, real_rows
from megagent.batch import StepBatch
from megagent.errors import BatchError


def same_values(left: StepBatch, right: StepBatch) -> bool:
    if set(left.names) != set(right.names) or len(left) != len(right):
        return False
    for name in left.names:
        a, b = left[name], right[name]
        if hasattr(a, "lengths"):
            equal = torch.equal(a.lengths, b.lengths) and torch.equal(a.values, b.values)
        else:
            equal = torch.equal(a, b) if isinstance(a, torch.Tensor) else list(a) == list(b)
        if not equal:
            return False
    return True


@given(seed=st.integers(0, 1000), multiple=st.integers(1, 70))
def test_rows_become_the_next_multiple(random_batch: Callable[..., StepBatch], seed: int, multiple: int) -> None:
    batch = random_batch(seed=seed)
    aligned = align(batch, multiple)
    assert len(aligned) % multiple == 0
    assert len(batch) <= len(aligned) < len(batch) + multiple
    assert int(aligned["is_padding"].sum()) == len(aligned) - len(batch)


@given(seed=st.integers(0, 1000), multiple=st.integers(1, 70))
def test_real_rows_keep_their_values_and_order(
    random_batch: Callable[..., StepBatch], seed: int, multiple: int
) -> None:
    batch = random_batch(seed=seed)
    assert same_values(real_rows(align(batch, multiple)).without("is_padding"), batch)


@given(seed=st.integers(0, 1000), multiple=st.integers(1, 70))
def test_padding_rows_carry_no_weight_and_belong_to_nobody(
    random_batch: Callable[..., StepBatch], seed: int, multiple: int
) -> None:
    aligned = align(random_batch(seed=seed), multiple)
    padding = aligned.take(aligned["is_padding"])
    assert not padding["response_mask"].values.any()
    assert not padding["rewards"].any()
    assert not padding["episode_rewards"].any()
    assert padding["is_action_valid"].all()
    for name in ("uid", "traj_uid"):
        assert len(set(padding[name])) == len(padding)
        assert not set(padding[name]) & set(real_rows(aligned)[name])


def test_padding_rows_have_one_legal_token_each_way(random_batch: Callable[..., StepBatch]) -> None:
    batch = random_batch()
    aligned = align(batch, 64)
    padding = aligned.take(aligned["is_padding"])
    for name in ("prompts", "responses"):
        assert padding[name].lengths.tolist() == [1] * len(padding)
        assert set(padding[name].values.tolist()) == {int(batch[name].values[0])}


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8))
def test_padding_is_shared_equally_by_all_parts(rows: int, parts: int, part_rows: int) -> None:
    batch = StepBatch({"step_index": torch.arange(rows)})
    aligned = align(batch, parts * part_rows)
    counts = [int(part["is_padding"].sum()) for part in aligned.split(parts)]
    assert max(counts) - min(counts) <= 1


def test_aligning_twice_repeats_no_name(random_batch: Callable[..., StepBatch]) -> None:
    aligned = align(align(random_batch(), 7), 64)
    names = [name for name in aligned["uid"] if name.startswith("padding")]
    assert len(names) == len(set(names)) == int(aligned["is_padding"].sum())


def test_a_column_over_prompt_and_response_gets_both_tokens(random_batch: Callable[..., StepBatch]) -> None:
    batch = random_batch()
    rows = [torch.ones(int(n)) for n in batch["prompts"].lengths + batch["responses"].lengths]
    aligned = align(batch.with_columns(loss_weights=type(batch["responses"]).from_list(rows)), 64)
    padding = aligned.take(aligned["is_padding"])
    assert padding["loss_weights"].lengths.tolist() == [2] * len(padding)
    assert not padding["loss_weights"].values.any()


def test_a_batch_that_fits_only_gains_the_mark(random_batch: Callable[..., StepBatch]) -> None:
    aligned = align(random_batch(), 1)
    assert not aligned["is_padding"].any()
    assert same_values(aligned.without("is_padding"), random_batch())


@given(seed=st.integers(0, 1000), multiple=st.integers(1, 70))
def test_copies_are_rows_of_the_batch_and_count_like_them(
    random_batch: Callable[..., StepBatch], seed: int, multiple: int
) -> None:
    batch = random_batch(seed=seed)
    aligned = align(batch, multiple, "copy", seed)
    assert len(aligned) % multiple == 0
    assert not aligned["is_padding"].any()
    assert same_values(aligned.take(list(range(len(batch)))).without("is_padding"), batch)
    known = set(zip(batch["traj_uid"], batch["step_index"].tolist(), strict=True))
    assert set(zip(aligned["traj_uid"], aligned["step_index"].tolist(), strict=True)) <= known


@given(seed=st.integers(0, 1000), multiple=st.integers(1, 20))
def test_deleting_leaves_rows_in_order(random_batch: Callable[..., StepBatch], seed: int, multiple: int) -> None:
    batch = random_batch(seed=seed).with_columns(place=torch.arange(len(random_batch(seed=seed))))
    aligned = align(batch, multiple, "delete", seed)
    if len(batch) >= multiple:
        assert len(aligned) == len(batch) // multiple * multiple
        assert not aligned["is_padding"].any()
        assert (aligned["place"].diff() > 0).all()


def test_fewer_rows_than_a_multiple_are_padded_rather_than_all_deleted() -> None:
    aligned = align(StepBatch({"step_index": torch.arange(3)}), 8, "delete")
    assert aligned["is_padding"].tolist().count(False) == 3
    assert len(aligned) == 8


@pytest.mark.parametrize("mode", ["copy", "delete"])
def test_what_is_drawn_follows_the_seed(mode: str) -> None:
    batch = StepBatch({"step_index": torch.arange(100)})
    first, again, other = (align(batch, 64, mode, seed)["step_index"].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_an_unknown_adjustment_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BatchError, match="algo.adjust=drop is unknown; use pad, copy, delete"):
        align(StepBatch({"step_index": torch.arange(3)}), 8, "drop")


def test_no_rows_stay_no_rows(random_batch: Callable[..., StepBatch]) -> None:
    assert len(align(random_batch().take([]), 8)) == 0


def test_a_multiple_below_one_is_refused(random_batch: Callable[..., StepBatch]) -> None:
    with pytest.raises(BatchError, match="multiple of 0 rows"):
        align(random_batch(), 0)
