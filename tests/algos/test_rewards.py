from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.rewards import place_episode_reward
from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError


def rows_with_masks(masks: list[list[int]], rewards: list[float]) -> StepBatch:
    mask = Jagged.from_list([torch.tensor(row, dtype=torch.float32) for row in masks], dtype=torch.float32)
    return StepBatch({"response_mask": mask, "episode_rewards": torch.tensor(rewards)})


def placed(batch: StepBatch) -> list[list[float]]:
    return [row.tolist() for row in place_episode_reward(batch)["token_rewards"].rows()]


def test_the_reward_sits_on_the_last_response_token_of_every_step() -> None:
    assert placed(rows_with_masks([[1, 1, 1], [1]], [10.0, 10.0])) == [[0.0, 0.0, 10.0], [10.0]]


def test_tokens_without_loss_at_the_end_do_not_carry_it() -> None:
    assert placed(rows_with_masks([[1, 0, 1, 0, 0]], [4.0])) == [[0.0, 0.0, 4.0, 0.0, 0.0]]


def test_a_row_without_loss_tokens_keeps_its_reward() -> None:
    assert placed(rows_with_masks([[0, 0]], [3.0])) == [[0.0, 3.0]]


def test_padding_rows_get_none() -> None:
    batch = rows_with_masks([[1], [0], []], [10.0, 7.0, 7.0]).with_columns(is_padding=torch.tensor([False, True, True]))
    assert placed(batch) == [[10.0], [0.0], []]


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(BatchError, match="row 1 has an empty response"):
        placed(rows_with_masks([[1], []], [1.0, 1.0]))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=12))
def test_the_token_found_equals_that_of_a_loop(masks: list[list[int]]) -> None:
    expected = []
    for row in masks:
        at = max((i for i, loss in enumerate(row) if loss), default=len(row) - 1)
        expected.append([1.0 if i == at else 0.0 for i in range(len(row))])
    assert placed(rows_with_masks(masks, [1.0] * len(masks))) == expected
