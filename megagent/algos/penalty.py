"""What an action costs that could not be understood or was not admissible."""

from __future__ import annotations

import torch
from torch import Tensor

from megagent.algos.groups import padding_rows
from megagent.algos.rewards import add_to_last_token
from megagent.batch import StepBatch


def fines(batch: StepBatch, coef: float) -> Tensor:
    """[rows] float32: coef for every row whose action was invalid, 0 for the others and for padding rows."""
    return (~batch["is_action_valid"] & ~padding_rows(batch)).to(torch.float32) * coef


def apply_invalid_action_penalty(batch: StepBatch, coef: float, on_returns: bool = True) -> StepBatch:
    """Subtracts coef from both signals of every row whose action was invalid.

    The signals are the row's last valid token in token_rewards (the episode side) and its entry in returns (the step
    side). Returns are already discounted then, so the penalty stays with its own step and does not reach earlier ones;
    on_returns=False leaves them alone, for returns in which the penalty was discounted with the rewards.
    Needs is_action_valid [rows] bool, token_rewards and returns; leaves padding rows alone.
    Source: verl-agent's apply_invalid_action_penalty.
    """
    fine = -fines(batch, coef)
    batch = batch.with_columns(token_rewards=add_to_last_token(batch["token_rewards"], fine, batch))
    if not on_returns:
        return batch
    return batch.with_columns(returns=batch["returns"] + fine.to(batch["returns"].dtype))


def valid_action_ratio(batch: StepBatch) -> float:
    """Share of the rows (padding aside) whose action was valid; 1.0 for a batch without rows."""
    real = batch["is_action_valid"][~padding_rows(batch)]
    return float(real.to(torch.float32).mean()) if real.numel() else 1.0
