"""GiGPO: the episode advantage of GRPO plus the advantage of a step among steps taken from the same state.

Two episodes of a task often pass the same page. There they chose different actions with different returns, so the page
is a group of its own: it tells which action was better from right here, not only which episode went better overall.
Source: GiGPO (arXiv 2505.10978) and its implementation in verl-agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megagent.algos.groups import normalise, number, padding_rows, spread_over_loss_tokens
from megagent.algos.grpo import episode_advantages
from megagent.batch import Jagged, StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def step_groups(batch: StepBatch) -> Tensor:
    """[rows] int64: number of the row's step group, -1 for padding rows.

    A step group is all rows of a task (uid) whose anchor_obs, the observation without history, is exactly equal.
    """
    return number(batch["uid"], batch["anchor_obs"], skip=padding_rows(batch))


def step_advantages(batch: StepBatch, algo: AlgoConfig) -> Tensor:
    """[rows] float32: the step's discounted return against its step group; 0 for a step alone in its group."""
    return normalise(batch["returns"], step_groups(batch), algo.norm, lone="zero")


def gigpo_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """Jagged float32 over the responses: episode + algo.step_weight * step on every token that carries loss.

    Needs uid, anchor_obs, returns, token_rewards and response_mask. Padding rows get 0 and change no statistic.
    """
    joint = episode_advantages(batch, algo) + algo.step_weight * step_advantages(batch, algo)
    return spread_over_loss_tokens(batch, joint)
