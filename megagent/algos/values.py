"""The critic's loss on tokens, summed as the policy's is: micro-batches, ranks and padding rows change nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megagent.algos.losses import token_sum
from megagent.batch import StepBatch

# Sums over loss tokens that value_loss reports, by the names of verl's dashboards.
VALUE_METRICS = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error of every token, or that of the value held to old_values +- clip where this is larger.

    All tensors of one shape. A value that moves further than `clip` towards its target gets no gradient; one that has
    moved away from it does. Returns (loss, whether the held side was chosen), same shape.
    Source: PPO's implementations (OpenAI baselines; arXiv 2005.12729, section 2).
    """
    held = old_values + (values - old_values).clamp(-clip, clip)
    free_error, held_error = (values - targets).square(), (held - targets).square()
    return 0.5 * torch.maximum(free_error, held_error), held_error > free_error


def value_loss(
    values: Tensor, columns: Mapping[str, Tensor], clip: float, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss of one micro-batch's tokens.

    values: [tokens], of the critic that learns; columns: values (before the update), value_targets and response_mask,
    [tokens] each; denominator: loss tokens of the whole mini-batch over all data-parallel ranks, at least 1.
    Returns the scalar loss, a sum over loss tokens over the denominator, and VALUE_METRICS as detached sums: add them
    over micro-batches and ranks, then divide by the loss tokens. Masked tokens may hold anything.
    """
    keep = columns["response_mask"] != 0
    values = torch.where(keep, values, 0.0).float()
    old_values = torch.where(keep, columns["values"], 0.0).float()
    targets = torch.where(keep, columns["value_targets"], 0.0).float()
    loss, clipped = clipped_value_loss(values, old_values, targets, clip)
    total = token_sum(loss, keep)
    sums = {
        "critic/vf_loss": total.detach(),
        "critic/vf_clipfrac": token_sum(clipped.float(), keep),
        "critic/vpred_mean": token_sum(values.detach(), keep),
    }
    return total / max(denominator, 1.0), sums


def explained_variance(batch: StepBatch) -> float:
    """1 - Var(targets - values) / Var(targets) over the loss tokens: 1 for a perfect critic, 0 for a constant one.

    NaN where all targets are equal, for there is nothing to explain. Needs values, value_targets and response_mask.
    """
    keep = batch["response_mask"].values != 0
    targets = batch["value_targets"].values[keep].double()
    errors = targets - batch["values"].values[keep].double()
    variance = float(targets.var(correction=0)) if len(targets) else 0.0
    return 1.0 - float(errors.var(correction=0)) / variance if variance > 0 else float("nan")
