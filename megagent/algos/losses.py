"""The policy loss on tokens, summed so that it does not depend on how the tokens are dealt out.

Every term is a sum over loss tokens divided by one denominator: the number of loss tokens of the whole mini-batch, over
all data-parallel ranks. Micro-batches, ranks and padding rows then only decide where a summand is computed. A mean per
micro-batch, averaged afterwards, would weigh a token by how few others happen to share its micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagent.errors import MegagentError

if TYPE_CHECKING:
    from megagent.config import AlgoConfig

LOG_RATIO_LIMIT = 20.0  # exp() of more is useless as a ratio, and overflows in half precision
LOW_VAR_KL_LIMIT = 10.0  # one token that the reference finds impossible must not own the gradient

# Sums over loss tokens that ppo_loss reports, by the names of verl's dashboards.
LOSS_METRICS = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl")


def ppo_clip_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate of every token: max(-A r, -A clamp(r, 1 - clip, 1 + clip)) with r = p / p_old.

    All tensors of one shape. Returns (loss, whether the clipped side was chosen, p_old-to-p log ratio), same shape.
    Source: PPO (arXiv 1707.06347).
    """
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - clip, 1.0 + clip)
    return torch.maximum(free, held), held > free, log_ratio


def low_var_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL(policy || reference) of every token by the k3 estimator: exp(d) - d - 1 with d = log p_ref - log p.

    Never negative; d is held to +-20 and the result to 10. Where a limit holds, the gradient is zero.
    Source: http://joschu.net/blog/kl-approx.html; limits as verl's low_var_kl.
    """
    difference = (ref_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (difference.exp() - difference - 1.0).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"low_var_kl": low_var_kl}


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: sum of values where mask is not 0. Masked tokens may hold anything, also NaN."""
    return torch.where(mask != 0, values, 0.0).sum()


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor | None,
    ref_log_probs: Tensor | None,
    algo: AlgoConfig,
    denominator: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO with entropy bonus and KL to the reference, for the tokens of one micro-batch.

    log_probs, old_log_probs, advantages, mask, entropy, ref_log_probs: one shape, [tokens] or [rows, tokens]; mask is
    1 on loss tokens. entropy may be None if algo.entropy_coef is 0, ref_log_probs if algo.kl_coef is 0.
    denominator: loss tokens of the whole mini-batch over all data-parallel ranks (0 counts as 1: nothing to learn from,
    and the loss is 0).
    Returns the scalar loss, sum over tokens of pg - entropy_coef * entropy + kl_coef * kl, over the denominator, and
    LOSS_METRICS as detached sums over tokens: add them over micro-batches and ranks, then call mean_metrics.
    Losses and gradients of micro-batches add up to those of the mini-batch. A caller whose gradients are averaged over
    dp ranks multiplies the loss by dp.
    """
    # Nothing may come out of a masked token, forward or backward. 0 * inf is NaN, so it is replaced, not multiplied.
    keep = mask != 0
    log_probs = torch.where(keep, log_probs, 0.0).float()
    old_log_probs = torch.where(keep, old_log_probs, 0.0).float()
    advantages = torch.where(keep, advantages, 0.0).float()

    pg, clipped, log_ratio = ppo_clip_loss(log_probs, old_log_probs, advantages, algo.clip)
    pg_sum = token_sum(pg, mask)
    total = pg_sum
    sums = {
        "actor/pg_loss": pg_sum,
        "actor/pg_clipfrac": token_sum(clipped.float(), mask),
        "actor/ppo_kl": token_sum(-log_ratio, mask),
    }
    if entropy is not None:
        sums["actor/entropy"] = token_sum(entropy.float(), mask)
        total = total - algo.entropy_coef * sums["actor/entropy"]
    elif algo.entropy_coef != 0:
        raise MegagentError(f"algo.entropy_coef={algo.entropy_coef} needs the entropy of the tokens; give it or use 0")
    if ref_log_probs is not None:
        ref_log_probs = torch.where(keep, ref_log_probs, 0.0).float()
        sums["actor/kl_loss"] = token_sum(_kl_estimator(algo)(log_probs, ref_log_probs), mask)
        total = total + algo.kl_coef * sums["actor/kl_loss"]
    elif algo.kl_coef != 0:
        raise MegagentError(f"algo.kl_coef={algo.kl_coef} needs the reference's log-probs; give them or use 0")
    return total / _positive(denominator), {name: value.detach() for name, value in sums.items()}


def mean_metrics(sums: Mapping[str, Tensor | float], denominator: float | Tensor) -> dict[str, float]:
    """The sums of ppo_loss, added over all micro-batches and ranks, as means over the mini-batch's loss tokens."""
    return {name: float(value) / float(_positive(denominator)) for name, value in sums.items()}


def _kl_estimator(algo: AlgoConfig) -> Callable[[Tensor, Tensor], Tensor]:
    if algo.kl_estimator not in KL_ESTIMATORS:
        raise MegagentError(f"algo.kl_estimator={algo.kl_estimator} is unknown; use {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[algo.kl_estimator]


def _positive(denominator: float | Tensor) -> float | Tensor:
    return denominator.clamp(min=1) if isinstance(denominator, Tensor) else max(denominator, 1.0)
