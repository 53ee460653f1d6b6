"""The policy loss on tokens, summed so that it does not depend on how the tokens are dealt out.

Every term is a weighted sum over loss tokens divided by one denominator of the whole mini-batch over all data-parallel
ranks: its loss tokens, or its rows that have any. Micro-batches, ranks and padding rows then only decide where a
summand is computed. A mean per micro-batch, averaged later, would weigh a token by how few others happen to share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from megagent.algos.kl import LOG_RATIO_LIMIT, kl_estimator
from megagent.batch import Jagged, StepBatch
from megagent.errors import MegagentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from megagent.config import AlgoConfig

# Sums over loss tokens that policy_loss reports, by the names of verl's dashboards.
LOSS_METRICS = (
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
)

# (loss, whether the clip changed it, whether the dual clip did) of every token, one shape.
Surrogate: TypeAlias = "tuple[Tensor, Tensor, Tensor]"


# ---------------------------------------------------------------------------------------------------------------------
# What a token weighs
# ---------------------------------------------------------------------------------------------------------------------


def with_loss_columns(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """Adds what policy_loss reads besides the standard columns, from response_mask.

    token_weights: Jagged float32, what each loss token counts under algo.aggregation: 1, or in seq-mean-token-mean one
    over the loss tokens of its row; loss_rows: Jagged int64, the number of the token's row.
    """
    mask: Jagged = batch["response_mask"]
    loss = (mask.values != 0).to(torch.float32)
    weights = mask.like(loss)
    if algo.aggregation == "seq-mean-token-mean":
        weights = mask.like(loss / mask.spread(weights.sums().clamp(min=1)).values)
    elif algo.aggregation not in ("token-mean", "seq-mean-token-sum"):
        raise MegagentError(
            f"algo.aggregation={algo.aggregation} is unknown; use token-mean, seq-mean-token-sum or seq-mean-token-mean"
        )
    return batch.with_columns(token_weights=weights, loss_rows=mask.like(mask.row_of_token))


def loss_shares(batch: StepBatch, algo: AlgoConfig) -> Tensor:
    """[rows] int64: each row's part of the denominator; the sum over a mini-batch and all ranks is the denominator.

    token-mean: the row's loss tokens; else 1 for a row that has any.
    """
    tokens = batch["response_mask"].like((batch["response_mask"].values != 0).to(torch.int64)).sums()
    return tokens if algo.aggregation == "token-mean" else tokens.clamp(max=1)


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: sum of values where mask is not 0. Masked tokens may hold anything, also NaN."""
    return torch.where(mask != 0, values, 0.0).sum()


# ---------------------------------------------------------------------------------------------------------------------
# Surrogates
# ---------------------------------------------------------------------------------------------------------------------


def clip_range(algo: AlgoConfig) -> tuple[float, float]:
    """The ratios between which a token may move the policy."""
    return 1.0 - algo.clip, 1.0 + (algo.clip_high or algo.clip)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, algo: AlgoConfig) -> Surrogate:
    """max(-A r, -A clamp(r, 1 - clip, 1 + clip_high)); for A < 0 at most -A dual_clip, if there is one.

    Source: PPO (arXiv 1707.06347); a higher upper side as DAPO (arXiv 2503.14476); dual clip (arXiv 1912.09729).
    """
    free = -advantages * ratio
    held = -advantages * ratio.clamp(*clip_range(algo))
    loss = torch.maximum(free, held)
    if not algo.dual_clip:
        return loss, held > free, torch.zeros_like(free, dtype=torch.bool)
    most = -advantages * algo.dual_clip
    too_much = (advantages < 0) & (loss > most)
    return torch.where(too_much, most, loss), held > free, too_much


def ppo_surrogate(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, rows: Tensor, algo: AlgoConfig
) -> Surrogate:
    """clipped_surrogate of the token's own ratio."""
    return clipped_surrogate(log_ratio.exp(), advantages, algo)


def gspo_surrogate(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, rows: Tensor, algo: AlgoConfig
) -> Surrogate:
    """clipped_surrogate of the row's ratio: the geometric mean of those of its loss tokens. All must be here.

    The gradient reaches each token as if the ratio were its own (GSPO-token), which is the row's gradient where all
    tokens of a row share an advantage. Source: GSPO, eq. 7 and 14 (arXiv 2507.18071).
    """
    _, row = torch.unique(rows, return_inverse=True)
    count = torch.bincount(row).to(log_ratio.dtype)
    mean = torch.zeros_like(count).index_add_(0, row, log_ratio.detach()) / count
    return clipped_surrogate((mean[row] + log_probs - log_probs.detach()).exp(), advantages, algo)


def cispo_surrogate(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, rows: Tensor, algo: AlgoConfig
) -> Surrogate:
    """-A log p times the clipped ratio, which has no gradient: a clipped token still teaches, with a bounded weight.

    Source: CISPO, MiniMax-M1 (arXiv 2506.13585).
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(*clip_range(algo))
    return -advantages * weight * log_probs, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool)


SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, AlgoConfig], Surrogate]] = {
    "ppo": ppo_surrogate,
    "gspo": gspo_surrogate,
    "cispo": cispo_surrogate,
}


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


def policy_loss(
    log_probs: Tensor,
    columns: Mapping[str, Tensor],
    entropy: Tensor | None,
    algo: AlgoConfig,
    denominator: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss with entropy bonus and KL to the reference, for the tokens of one micro-batch of whole rows.

    log_probs: [tokens]; columns: [tokens] each, old_log_probs, advantages, response_mask (1 on loss tokens),
    token_weights and loss_rows (see with_loss_columns), and ref_log_probs if the loss has a KL; entropy: [tokens], may
    be None if algo.entropy_coef is 0. denominator: sum of loss_shares over the whole mini-batch and all data-parallel
    ranks (0 counts as 1: nothing to learn from, and the loss is 0).
    Returns the scalar loss, sum over tokens of pg - entropy_coef * entropy + kl_coef * kl, over the denominator, and
    LOSS_METRICS as detached sums over tokens: add them over micro-batches and ranks, then call mean_metrics.
    Losses and gradients of micro-batches add up to those of the mini-batch. A caller whose gradients are averaged over
    dp ranks multiplies the loss by dp.
    """
    if algo.loss not in SURROGATES:
        raise MegagentError(f"algo.loss={algo.loss} is unknown; use {', '.join(SURROGATES)}")
    # Only loss tokens are looked at: 0 * inf is NaN, so nothing of a masked token may reach the arithmetic.
    keep = columns["response_mask"] != 0
    log_probs = log_probs[keep].float()
    old_log_probs, advantages, weights = (
        columns[name][keep].float() for name in ("old_log_probs", "advantages", "token_weights")
    )
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    pg, clipped, dual_clipped = SURROGATES[algo.loss](
        log_probs, log_ratio, advantages, columns["loss_rows"][keep], algo
    )

    def total_of(values: Tensor) -> Tensor:
        return token_sum(values.float() * weights, weights)

    total = total_of(pg)
    sums = {
        "actor/pg_loss": total,
        "actor/pg_clipfrac": total_of(clipped),
        "actor/pg_clipfrac_lower": total_of(dual_clipped),
        "actor/ppo_kl": total_of(-log_ratio),
    }
    if entropy is not None:
        sums["actor/entropy"] = total_of(entropy[keep])
        total = total - algo.entropy_coef * sums["actor/entropy"]
    elif algo.entropy_coef != 0:
        raise MegagentError(f"algo.entropy_coef={algo.entropy_coef} needs the entropy of the tokens; give it or use 0")
    kl_coef = algo.kl_coef if algo.kl_in == "loss" else 0.0
    ref_log_probs = columns.get("ref_log_probs")
    if ref_log_probs is not None:
        sums["actor/kl_loss"] = total_of(kl_estimator(algo.kl_estimator)(log_probs, ref_log_probs[keep].float()))
        total = total + kl_coef * sums["actor/kl_loss"]
    elif kl_coef != 0:
        raise MegagentError(f"algo.kl_coef={algo.kl_coef} needs the reference's log-probs; give them or use 0")
    return total / _positive(denominator), {name: value.detach() for name, value in sums.items()}


def mean_metrics(sums: Mapping[str, Tensor | float], denominator: float | Tensor) -> dict[str, float]:
    """The sums of policy_loss, added over all micro-batches and ranks, as means in the sense of algo.aggregation."""
    return {name: float(value) / float(_positive(denominator)) for name, value in sums.items()}


def _positive(denominator: float | Tensor) -> float | Tensor:
    return denominator.clamp(min=1) if isinstance(denominator, Tensor) else max(denominator, 1.0)
