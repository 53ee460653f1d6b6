"""Credit assignment in the order of the pipeline: from what the episodes earned to one advantage per token.

Between these verbs the trainer aligns the batch and has the ranks compute log-probs; none of them needs those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagent.algos.advantages import estimate_advantages
from megagent.algos.groups import number
from megagent.algos.penalty import apply_invalid_action_penalty
from megagent.algos.returns import discounted_returns
from megagent.algos.rewards import place_episode_reward
from megagent.batch import StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def credit(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """Adds returns, token_rewards and advantages to collected rows, aligned or not (padding changes nothing)."""
    batch = step_returns(batch, algo)
    batch = place_episode_reward(batch)
    batch = penalise(batch, algo)
    return estimate_advantages(batch, algo)


def step_returns(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """Adds returns [rows] from rewards, traj_uid and step_index, discounted by algo.gamma within each episode."""
    batch.require("rewards", "traj_uid", "step_index")
    returns = discounted_returns(batch["rewards"], number(batch["traj_uid"]), algo.gamma, batch["step_index"])
    return batch.with_columns(returns=returns)


def penalise(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """Subtracts algo.invalid_action_penalty from both signals of rows with an invalid action."""
    return apply_invalid_action_penalty(batch, algo.invalid_action_penalty)
