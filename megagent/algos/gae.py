"""Generalised advantage estimation, from the values of a critic: over the steps of an episode, or a step's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagent.algos.groups import padding_rows, spread_over_loss_tokens, whiten
from megagent.algos.grpo import episodes
from megagent.algos.returns import discounted_returns, following
from megagent.batch import Jagged, StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def gae(batch: StepBatch, algo: AlgoConfig) -> tuple[Jagged, Jagged]:
    """(advantages before whitening, value targets), both Jagged float32 over the responses, 0 where no loss is.

    values: Jagged float32 over the responses, what the critic expects before each token is written.
    algo.gae_over=steps: delta_k = r_k + gamma V_{k+1} - V_k along the steps of an episode, V_k the value before the
    first token of step k, r_k its reward less its own charges (penalty, KL); all tokens of a step share its advantage.
    tokens: along the loss tokens of one step, with algo.token_gamma, whose reward is the episode's at the last of them.
    After the last step or token the value is 0. The targets are advantages plus values.
    Raises BatchError if an episode's rows are not in time order.
    Source: GAE (arXiv 1506.02438); over turns as VAGEN and ArCHer have it.
    """
    batch.require("values", "token_rewards", "response_mask")
    return _over_tokens(batch, algo) if algo.gae_over == "tokens" else _over_steps(batch, algo)


def gae_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """gae's advantages, whitened over all loss tokens of the batch.

    Needs values, token_rewards and response_mask; over steps also uid, traj_uid, step_index, rewards, episode_rewards.
    """
    advantages, _ = gae(batch, algo)
    mask: Jagged = batch["response_mask"]
    real = ~mask.spread(padding_rows(batch)).values
    return advantages.like(whiten(advantages.values, (mask.values != 0) & real))


def _over_steps(batch: StepBatch, algo: AlgoConfig) -> tuple[Jagged, Jagged]:
    batch.require("uid", "traj_uid", "step_index", "rewards", "episode_rewards")
    values: Jagged = batch["values"]
    real = ~padding_rows(batch)
    charges = batch["token_rewards"].sums() - batch["episode_rewards"]  # penalty and KL of this step alone
    rewards = (batch["rewards"] + charges).to(torch.float64)[real]
    first = values.offsets[:-1].clamp(max=max(values.tokens - 1, 0))
    value = torch.where(values.lengths > 0, values.values[first], 0.0).to(torch.float64)[real]
    chain = episodes(batch)[real]
    advantage = torch.zeros(len(batch), dtype=torch.float64)
    advantage[real] = _gae(rewards, value, chain, algo.gamma, algo.gae_lambda, batch["step_index"][real])
    target = advantage.clone()
    target[real] += value
    return spread_over_loss_tokens(batch, advantage), spread_over_loss_tokens(batch, target)


def _over_tokens(batch: StepBatch, algo: AlgoConfig) -> tuple[Jagged, Jagged]:
    mask: Jagged = batch["response_mask"]
    loss = (mask.values != 0) & ~mask.spread(padding_rows(batch)).values
    rewards = batch["token_rewards"].values[loss].to(torch.float64)
    value = batch["values"].values[loss].to(torch.float64)
    advantage = _gae(rewards, value, mask.row_of_token[loss], algo.token_gamma, algo.gae_lambda)
    advantages, targets = torch.zeros(mask.tokens), torch.zeros(mask.tokens)
    advantages[loss] = advantage.to(torch.float32)
    targets[loss] = (advantage + value).to(torch.float32)
    return mask.like(advantages), mask.like(targets)


def _gae(
    rewards: Tensor, values: Tensor, chain: Tensor, gamma: float, lam: float, step_index: Tensor | None = None
) -> Tensor:
    deltas = rewards + gamma * following(values, chain) - values
    return discounted_returns(deltas, chain, gamma * lam, step_index)
