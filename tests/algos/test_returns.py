from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.groups import number
from megagent.algos.returns import discounted_returns
from megagent.batch import StepBatch
from megagent.errors import BatchError


def loop_returns(rewards: list[float], traj: list[int], gamma: float) -> list[float]:
    """One row at a time, from the back."""
    running: dict[int, float] = {}
    out = [0.0] * len(rewards)
    for i in reversed(range(len(rewards))):
        running[traj[i]] = rewards[i] + gamma * running.get(traj[i], 0.0)
        out[i] = running[traj[i]]
    return out


def test_a_reward_at_the_end_is_discounted_backwards() -> None:
    returns = discounted_returns(torch.tensor([0.0, 0.0, 0.0, 10.0]), torch.zeros(4, dtype=torch.int64), 0.95)
    torch.testing.assert_close(returns, torch.tensor([8.57375, 9.025, 9.5, 10.0]))


def test_an_episode_does_not_see_the_rewards_of_another() -> None:
    returns = discounted_returns(torch.tensor([0.0, 0.0, 10.0, 1.0]), torch.tensor([5, 2, 5, 2]), 0.5)
    assert returns.tolist() == [5.0, 0.5, 10.0, 1.0]


@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), max_size=30), st.floats(0, 1))
def test_equals_a_loop_over_rows(rows: list[tuple[float, int]], gamma: float) -> None:
    rewards, traj = [r for r, _ in rows], [t for _, t in rows]
    returns = discounted_returns(torch.tensor(rewards), torch.tensor(traj, dtype=torch.int64), gamma)
    torch.testing.assert_close(returns, torch.tensor(loop_returns(rewards, traj, gamma)), rtol=1e-6, atol=1e-5)


def test_rows_out_of_time_order_are_refused() -> None:
    with pytest.raises(BatchError, match="row 0 is step 1 and row 2 after it is step 0"):
        discounted_returns(torch.zeros(3), torch.tensor([0, 1, 0]), 0.9, step_index=torch.tensor([1, 0, 0]))


def test_episodes_between_each_other_are_in_time_order(random_batch: Callable[..., StepBatch]) -> None:
    batch = random_batch()
    order = torch.argsort(batch["step_index"], stable=True)  # all first steps, then all second ones, ...
    mixed = batch.take(order)
    traj = number(batch["traj_uid"])
    expected = discounted_returns(batch["rewards"], traj, 0.95, batch["step_index"])
    returns = discounted_returns(mixed["rewards"], number(mixed["traj_uid"]), 0.95, mixed["step_index"])
    assert torch.equal(returns, expected[order])
