"""Where the engine that sampled the tokens and the trainer that learns from them disagree about their probability.

Engine and trainer compute in other kernels and, often, other precisions, and with stale weights they are two policies.
The update then needs the ratio p_trainer / p_sampler as an importance weight, held to a limit; or what is far off is
left out. A weight w >= 0 scales both sides of the clipped surrogate (w max(a, b) = max(wa, wb)), so it is part of the
advantage, and the loss knows nothing of it.
Source: truncated importance sampling (Ionides, 2008), in the forms of verl's rollout correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megagent.algos.groups import padding_rows
from megagent.algos.kl import LOG_RATIO_LIMIT
from megagent.batch import Jagged, StepBatch
from megagent.errors import MegagentError

if TYPE_CHECKING:
    from megagent.config import AlgoConfig

_KINDS: dict[str, tuple[Literal["token", "sequence"], Literal["cap", "mask"]]] = {
    "token_tis": ("token", "cap"),
    "sequence_tis": ("sequence", "cap"),
    "token_mask": ("token", "mask"),
    "sequence_mask": ("sequence", "mask"),
}


def sampler_ratios(batch: StepBatch, level: Literal["token", "sequence"]) -> Jagged:
    """Jagged float32 over the responses: p_trainer / p_sampler of the token, or of all loss tokens of its row together.

    1 where no loss is. Log ratios are held to +-20. Needs old_log_probs, rollout_log_probs and response_mask.
    """
    batch.require("old_log_probs", "rollout_log_probs", "response_mask")
    mask: Jagged = batch["response_mask"]
    difference = (batch["old_log_probs"].values - batch["rollout_log_probs"].values).float()
    log_ratio = mask.like(torch.where(mask.values != 0, difference, 0.0))
    if level == "sequence":
        log_ratio = mask.spread(log_ratio.sums())
    ratio = log_ratio.values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return mask.like(torch.where(mask.values != 0, ratio, 1.0))


def correct_for_sampler(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """The batch with advantages weighted, or loss tokens left out, as algo.sampler_correction says.

    token_tis and sequence_tis multiply the advantages by the ratio, at most algo.sampler_ratio_max; token_mask and
    sequence_mask take tokens or whole rows out of response_mask, and their advantages, whose ratio is above
    sampler_ratio_max or below sampler_ratio_min. Adds sampler_weights, Jagged float32: the weight of each token, 0 for
    one that was left out. With none the batch stays as it is.
    """
    if algo.sampler_correction == "none":
        return batch
    if algo.sampler_correction not in _KINDS:
        raise MegagentError(f"algo.sampler_correction={algo.sampler_correction} is unknown; use {', '.join(_KINDS)}")
    level, action = _KINDS[algo.sampler_correction]
    ratio = sampler_ratios(batch, level).values
    mask, advantages = batch["response_mask"], batch["advantages"]
    if action == "cap":
        weights = ratio.clamp(max=algo.sampler_ratio_max)
    else:
        weights = ((ratio >= algo.sampler_ratio_min) & (ratio <= algo.sampler_ratio_max)) | (mask.values == 0)
        mask = mask.like(torch.where(weights, mask.values, 0))
        weights = weights.to(torch.float32)
    return batch.with_columns(
        advantages=advantages.like(advantages.values * weights), response_mask=mask, sampler_weights=mask.like(weights)
    )


def correction_metrics(batch: StepBatch, algo: AlgoConfig) -> dict[str, float]:
    """How far trainer and sampler are apart, whatever is done about it; empty where their log-probs are not known.

    sampler/ess is the share of the loss tokens that would be left as equally weighted ones (1: both policies are one),
    above_max and below_min the shares that a correction holds back.
    """
    if "old_log_probs" not in batch or "rollout_log_probs" not in batch:
        return {}
    loss = _loss_tokens(batch)
    ratio = sampler_ratios(batch, "token").values[loss].double()
    if ratio.numel() == 0:
        return {}
    metrics = {
        "sampler/ratio/mean": float(ratio.mean()),
        "sampler/ratio/max": float(ratio.max()),
        "sampler/ratio/min": float(ratio.min()),
        "sampler/ratio/above_max": float((ratio > algo.sampler_ratio_max).double().mean()),
        "sampler/ratio/below_min": float((ratio < algo.sampler_ratio_min).double().mean()),
        "sampler/ess": float(ratio.sum().square() / ratio.square().sum() / ratio.numel()),
    }
    if "sampler_weights" in batch:
        weights = batch["sampler_weights"].values
        metrics["sampler/masked_ratio"] = float((weights == 0).sum() / (loss | (weights == 0)).sum().clamp(min=1))
    return metrics


def _loss_tokens(batch: StepBatch) -> Tensor:
    mask: Jagged = batch["response_mask"]
    return (mask.values != 0) & ~mask.spread(padding_rows(batch)).values
