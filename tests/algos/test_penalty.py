from __future__ import annotations

import pytest
import torch

from megagent.algos.credit import penalise, step_returns
from megagent.algos.penalty import apply_invalid_action_penalty, valid_action_ratio
from megagent.batch import Jagged, StepBatch, objects
from megagent.config import AlgoConfig


@pytest.fixture
def batch() -> StepBatch:
    mask = Jagged(torch.ones(5), torch.tensor([2, 2, 1]))
    return StepBatch(
        {
            "is_action_valid": torch.tensor([True, False, False]),
            "is_padding": torch.tensor([False, False, True]),
            "response_mask": mask,
            "token_rewards": mask.like(torch.tensor([0.0, 10.0, 0.0, 10.0, 0.0])),
            "returns": torch.tensor([9.5, 10.0, 0.0]),
        }
    )


def test_an_invalid_action_costs_on_both_signals(batch: StepBatch) -> None:
    fined = apply_invalid_action_penalty(batch, 0.1)
    torch.testing.assert_close(fined["token_rewards"].row(1), torch.tensor([0.0, 9.9]))
    torch.testing.assert_close(fined["returns"][1], torch.tensor(9.9))


def test_a_penalty_that_propagates_lowers_the_returns_before_it(batch: StepBatch) -> None:
    """Steps of one episode: the second was invalid, and at gamma 0.5 the first pays half of it."""
    batch = batch.with_columns(
        traj_uid=objects(["episode", "episode", "padding"]),
        step_index=torch.tensor([0, 1, 0]),
        rewards=torch.tensor([0.0, 10.0, 0.0]),
    )
    for propagates, first in ((False, 5.0), (True, 4.95)):
        algo = AlgoConfig(gamma=0.5, invalid_action_penalty=0.1, penalty_propagates=propagates)
        fined = penalise(step_returns(batch, algo), algo)
        torch.testing.assert_close(fined["returns"], torch.tensor([first, 9.9, 0.0]))
        torch.testing.assert_close(fined["token_rewards"].row(1), torch.tensor([0.0, 9.9]))


def test_valid_actions_and_padding_cost_nothing(batch: StepBatch) -> None:
    fined = apply_invalid_action_penalty(batch, 0.1)
    assert fined["token_rewards"].row(0).tolist() == [0.0, 10.0]
    assert fined["token_rewards"].row(2).tolist() == [0.0]
    assert fined["returns"][[0, 2]].tolist() == [9.5, 0.0]


def test_the_batch_before_it_is_unchanged(batch: StepBatch) -> None:
    before = batch["token_rewards"].values.clone()
    apply_invalid_action_penalty(batch, 0.1)
    assert torch.equal(batch["token_rewards"].values, before)


def test_the_ratio_of_valid_actions_leaves_padding_out(batch: StepBatch) -> None:
    assert valid_action_ratio(batch) == 0.5
