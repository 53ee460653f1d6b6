"""Estimators that take rewards as they are: reinforce_pp (with and without baseline), remax and step_returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megagent.algos.groups import padding_rows, spread_over_loss_tokens, whiten
from megagent.algos.grpo import against_task
from megagent.algos.returns import discounted_returns
from megagent.batch import Jagged, StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def token_returns(batch: StepBatch, gamma: float) -> Jagged:
    """Jagged float32 over the responses: return-to-go of every token within its response, 0 where no loss is.

    Tokens that carry no loss are passed over: they neither count as time nor hold a reward.
    """
    rewards, mask = batch["token_rewards"], batch["response_mask"].values != 0
    values = torch.zeros_like(rewards.values)
    values[mask] = discounted_returns(rewards.values[mask], rewards.row_of_token[mask], gamma)
    return rewards.like(values)


def reinforce_pp_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """Return-to-go of every token, discounted by algo.token_gamma, whitened over all loss tokens of the batch.

    Needs token_rewards and response_mask. Source: REINFORCE++ (arXiv 2501.03262).
    """
    returns = token_returns(batch, algo.token_gamma)
    return returns.like(whiten(returns.values, _loss_tokens(batch)))


def reinforce_pp_baseline_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """The row's score less its task's mean (by algo.baseline), whitened over all loss tokens of the batch.

    Needs uid, token_rewards and response_mask, and traj_uid if algo.baseline=trajectory.
    Source: REINFORCE++-baseline (arXiv 2501.03262).
    """
    scores = against_task(batch["token_rewards"].sums(), batch, "mean_norm", algo.baseline)
    spread = spread_over_loss_tokens(batch, scores)
    return spread.like(whiten(spread.values, _loss_tokens(batch)))


def remax_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """The row's score less the reward of a greedy episode of its task, which bears no penalty and no KL.

    Needs baseline_rewards [rows], token_rewards and response_mask. Source: ReMax (arXiv 2310.10505).
    """
    batch.require("baseline_rewards")
    scores = batch["token_rewards"].sums() - batch["baseline_rewards"].to(torch.float32)
    return spread_over_loss_tokens(batch, torch.where(padding_rows(batch), 0.0, scores))


def step_returns_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """The step's discounted return against those of all steps of its task, whatever their page.

    Needs uid, returns and response_mask, and traj_uid if algo.baseline=trajectory.
    """
    return spread_over_loss_tokens(batch, against_task(batch["returns"], batch, algo.norm, algo.baseline))


def _loss_tokens(batch: StepBatch) -> torch.Tensor:
    """[tokens] bool: the tokens that carry loss and are not of a padding row."""
    mask: Jagged = batch["response_mask"]
    return (mask.values != 0) & ~mask.spread(padding_rows(batch)).values
