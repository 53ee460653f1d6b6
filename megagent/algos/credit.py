"""Credit assignment in the order of the pipeline: from what the episodes earned to one advantage per token.

Between these verbs the trainer aligns the batch and has the ranks compute log-probs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagent.algos.advantages import estimate_advantages
from megagent.algos.correction import correct_for_sampler
from megagent.algos.finite import require_finite
from megagent.algos.groups import number
from megagent.algos.kl import charge_kl
from megagent.algos.penalty import apply_invalid_action_penalty, fines
from megagent.algos.returns import discounted_returns
from megagent.algos.rewards import place_episode_reward
from megagent.batch import StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def credit(batch: StepBatch, algo: AlgoConfig, kl_coef: float | None = None) -> StepBatch:
    """Adds returns, token_rewards and advantages to collected rows, aligned or not (padding changes nothing).

    Needs old_log_probs and ref_log_probs if the KL is part of the reward, and rollout_log_probs and old_log_probs for
    a correction of the sampler. kl_coef: as for charge.
    """
    return charge(place_episode_reward(step_returns(batch, algo)), algo, kl_coef)


def step_returns(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """Adds returns [rows] from rewards, traj_uid and step_index, discounted by algo.gamma within each episode.

    With algo.penalty_propagates the penalty of an invalid action is one of the rewards.
    """
    batch.require("rewards", "traj_uid", "step_index")
    rewards = batch["rewards"]
    if algo.penalty_propagates:
        rewards = rewards - fines(batch, algo.invalid_action_penalty).to(rewards.dtype)
    returns = discounted_returns(rewards, number(batch["traj_uid"]), algo.gamma, batch["step_index"])
    return batch.with_columns(returns=returns)


def penalise(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """Subtracts algo.invalid_action_penalty from both signals of rows with an invalid action.

    With algo.penalty_propagates the returns hold it already.
    """
    return apply_invalid_action_penalty(batch, algo.invalid_action_penalty, on_returns=not algo.penalty_propagates)


def charge(batch: StepBatch, algo: AlgoConfig, kl_coef: float | None = None) -> StepBatch:
    """Rows with returns, token_rewards and log-probs, less penalty and KL, with advantages.

    kl_coef: the coefficient of the KL in the reward where it is adapted, algo.kl_coef by default.
    Raises BatchError that names what is not a finite number (see require_finite).
    """
    require_finite(batch)
    batch = penalise(batch, algo)
    if algo.kl_in == "reward" and algo.kl_coef:
        batch = charge_kl(batch, algo.kl_estimator, algo.kl_coef if kl_coef is None else kl_coef)
    return correct_for_sampler(estimate_advantages(batch, algo), algo)
