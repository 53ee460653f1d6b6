"""KL to the reference: estimators from the log-probs of sampled tokens, the exact one, and the KL in the reward.

Source of k1, k2, k3: http://joschu.net/blog/kl-approx.html; limits and the + as in verl's kl_penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagent.algos.groups import padding_rows
from megagent.batch import Jagged, StepBatch
from megagent.errors import MegagentError

if TYPE_CHECKING:
    from megagent.config import AlgoConfig

LOG_RATIO_LIMIT = 20.0  # exp() of more is useless as a ratio, and overflows in half precision
LOW_VAR_KL_LIMIT = 10.0  # one token that the reference finds impossible must not own the gradient

KlEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log p - log p_ref: unbiased, often negative. Its gradient is 0 in expectation: as a loss it teaches nothing."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Half the squared difference of log-probs: biased, but its gradient is that of the KL in expectation."""
    return 0.5 * (log_probs - ref_log_probs).square()


def low_var_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL(policy || reference) of every token by the k3 estimator: exp(d) - d - 1 with d = log p_ref - log p.

    Unbiased and never negative; d is held to +-20 and the result to 10. Where a limit holds, the gradient is zero.
    """
    difference = (ref_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (difference.exp() - difference - 1.0).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


def straight_through(estimator: KlEstimator) -> KlEstimator:
    """The value of `estimator` with the gradient of k2."""

    def estimate(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        gradient = k2(log_probs, ref_log_probs)
        return estimator(log_probs, ref_log_probs).detach() + gradient - gradient.detach()

    return estimate


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": k1,
    "k2": k2,
    "k3": low_var_kl,
    "low_var_kl": low_var_kl,
    "k1+": straight_through(k1),
    "k3+": straight_through(low_var_kl),
    "low_var_kl+": straight_through(low_var_kl),
}


def kl_estimator(name: str) -> KlEstimator:
    """The estimator that algo.kl_estimator names. Both its arguments, and the result, are of one shape."""
    if name not in KL_ESTIMATORS:
        raise MegagentError(f"algo.kl_estimator={name} is unknown; use {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[name]


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || reference) over the whole vocabulary: exact, for vocabularies whose logits fit into memory.

    logits, ref_logits: [..., vocabulary], unnormalised; an entry of -inf in both counts as 0. Returns [...], float32.
    """
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_q = torch.log_softmax(ref_logits.float(), dim=-1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)


def token_kl(batch: StepBatch, estimator: str) -> Jagged:
    """Jagged float32 over the responses: KL of the sampling policy to the reference at loss tokens, 0 elsewhere.

    Needs old_log_probs, ref_log_probs and response_mask.
    """
    batch.require("old_log_probs", "ref_log_probs", "response_mask")
    mask: Jagged = batch["response_mask"]
    keep = (mask.values != 0) & ~mask.spread(padding_rows(batch)).values
    values = torch.zeros(mask.tokens)
    estimate = kl_estimator(estimator)
    values[keep] = estimate(batch["old_log_probs"].values[keep].float(), batch["ref_log_probs"].values[keep].float())
    return mask.like(values)


def mean_kl(batch: StepBatch, estimator: str) -> float:
    """Mean of token_kl over the loss tokens; 0 without any."""
    tokens = int((batch["response_mask"].values != 0).sum())
    return float(token_kl(batch, estimator).values.double().sum()) / max(tokens, 1)


def charge_kl(batch: StepBatch, estimator: str, coef: float) -> StepBatch:
    """token_rewards less coef times the KL of every loss token. The returns of the steps are not touched.

    Source: InstructGPT (arXiv 2203.02155); verl's apply_kl_penalty.
    """
    rewards: Jagged = batch["token_rewards"]
    return batch.with_columns(token_rewards=rewards.like(rewards.values - coef * token_kl(batch, estimator).values))


# ---------------------------------------------------------------------------------------------------------------------
# A coefficient that adapts
# ---------------------------------------------------------------------------------------------------------------------

KL_METRIC, KL_COEF_METRIC = "actor/reward_kl", "actor/reward_kl_coef"


def adapted_kl_coef(coef: float, kl: float, episodes: int, algo: AlgoConfig) -> float:
    """The coefficient for the next iteration, after one of `episodes` episodes with `coef` had a mean KL of `kl`.

    It moves in proportion to the relative distance from algo.kl_target, held to +-20%, and so that algo.kl_horizon
    episodes at that distance multiply it by about e^0.2. Without a target it stays.
    Source: Ziegler et al., section 2.2 (arXiv 1909.08593).
    """
    if not algo.kl_target:
        return coef
    error = min(max(kl / algo.kl_target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * episodes / algo.kl_horizon)


def resumed_kl_coef(records: Iterable[Mapping[str, float]], episodes: int, algo: AlgoConfig) -> float:
    """The coefficient after the iterations in `records`, metrics in order: the last one says what it was and did.

    So the controller needs no place in a checkpoint. Without a target it is algo.kl_coef, whatever it was before.
    """
    if not algo.kl_target:
        return algo.kl_coef
    last = None
    for record in records:
        if KL_METRIC in record and KL_COEF_METRIC in record:
            last = record
    return algo.kl_coef if last is None else adapted_kl_coef(last[KL_COEF_METRIC], last[KL_METRIC], episodes, algo)
