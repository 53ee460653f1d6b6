from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megagent.algos.adjust import align
from megagent.algos.credit import credit
from megagent.algos.finite import require_finite
from megagent.batch import StepBatch
from megagent.config import AlgoConfig
from megagent.errors import BatchError

TOKENS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values")


@pytest.fixture
def rows(random_batch: Callable[..., StepBatch]) -> StepBatch:
    batch = random_batch()
    column = batch["rollout_log_probs"]
    return batch.with_columns(**dict.fromkeys(TOKENS, column), baseline_rewards=torch.zeros(len(batch)))


def with_token(rows: StepBatch, name: str, value: float, mask: float) -> tuple[StepBatch, int]:
    """The rows with a value in the first token of this mask, and its place."""
    place = int(torch.nonzero(rows["response_mask"].values == mask)[0])
    values = rows[name].values.clone()
    values[place] = value
    return rows.with_columns(**{name: rows[name].like(values)}), place


def test_finite_numbers_pass(rows: StepBatch) -> None:
    require_finite(rows)
    require_finite(align(rows, 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", TOKENS)
def test_a_token_without_a_finite_number_is_named(rows: StepBatch, name: str, value: float) -> None:
    spoilt, place = with_token(rows, name, value, mask=1)
    row = int(rows["response_mask"].row_of_token[place])
    token = place - int(rows["response_mask"].offsets[row])
    step = f"step {int(rows['step_index'][row]) + 1} of {rows['traj_uid'][row]}"
    with pytest.raises(BatchError) as caught:
        credit(spoilt, AlgoConfig())
    assert f": {value} for response token {token} of row {row} ({step})." in str(caught.value)
    assert f" {name}, from the " in str(caught.value)


@pytest.mark.parametrize("name", ["rewards", "episode_rewards", "baseline_rewards"])
def test_a_reward_that_is_no_number_is_named(rows: StepBatch, name: str) -> None:
    rewards = rows[name].clone()
    rewards[2:4] = float("nan")
    with pytest.raises(BatchError, match=rf"{name}, from the environment: nan in row 2 \(step .*\), the first of 2"):
        credit(rows.with_columns(**{name: rewards}), AlgoConfig())


def test_masked_tokens_and_padding_rows_may_hold_anything(rows: StepBatch) -> None:
    spoilt, _ = with_token(rows, "old_log_probs", float("nan"), mask=0)
    aligned = align(spoilt, 64)
    rewards = torch.where(aligned["is_padding"], float("nan"), aligned["rewards"])
    require_finite(aligned.with_columns(rewards=rewards))


def test_all_columns_are_named_together(rows: StepBatch) -> None:
    spoilt, _ = with_token(rows, "old_log_probs", float("-inf"), mask=1)
    spoilt, _ = with_token(spoilt, "ref_log_probs", float("nan"), mask=1)
    with pytest.raises(
        BatchError, match=r"old_log_probs, from the trainer: -inf .*; ref_log_probs, from the reference"
    ):
        require_finite(spoilt)
