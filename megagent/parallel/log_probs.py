"""Log-probability and entropy of tokens, from the hidden states in front of a vocabulary-parallel output layer.

Logits are the largest tensors there are: they exist for a chunk of tokens at a time, and are made anew in the backward
pass. Every rank reduces its own columns to a few numbers a token, one all-gather shares them, and each rank combines
them in rank order: no rank sees the whole vocabulary, and all ranks return the same bits.

With x the logits divided by the temperature, p = softmax(x), H the entropy and t the target:
    d log p_t / d x_j = [j = t] - p_j
    d H       / d x_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits that exist at once, on one rank: 128 MiB in float32, whatever the batch. A matrix product over so many is as
# fast as one over all.
_CHUNK_ELEMENTS = 1 << 25
# exp() of anything below is 0 in float32 and in float64.
_LOWEST_SHIFTED = -1000.0


@dataclass(frozen=True)
class Scoring:
    """How tokens are scored.

    temperature divides the logits, as in sampling; entropy_gradient: whether the entropy is part of a loss, or only a
    figure to look at.
    """

    temperature: float = 1.0
    entropy_gradient: bool = False


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab: int,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token, and the entropy in nats of the distribution that it was drawn from.

    hidden: [n, hidden size], the same on every rank, any float dtype; weight: [v / tp, hidden size] this rank's rows of
    the output layer, padded vocabulary included; targets: [n] int64 token ids in [0, vocab); tp_group: the
    tensor-parallel group, None for a single rank; vocab: number of real entries, what lies beyond is padding and has
    probability 0.
    Returns ([n], [n]) float32 (float64 for float64 weights). A target outside [0, vocab) gives NaN, never a plausible
    number. Memory beyond arguments, results and gradients: a few chunks of logits. Forward and backward are collective
    over tp_group; the gradient of `hidden` is complete on every rank.
    Raises ValueError for shapes that do not fit.
    """
    return _TokenLogProbs.apply(hidden, weight, targets, tp_group, vocab, scoring)


class _TokenLogProbs(torch.autograd.Function):
    """token_log_probs with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tp_group: dist.ProcessGroup | None,
        vocab: int,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        count, width = hidden.shape[0], weight.shape[0]
        ranks, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
        if targets.shape != hidden.shape[:-1] or hidden.dim() != 2 or hidden.shape[1] != weight.shape[1]:
            raise ValueError(
                f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not "
                "fit: they are [n, h], [v, h] and [n]"
            )
        if not 0 < vocab <= ranks * width:
            raise ValueError(f"vocab={vocab} must be in [1, {ranks * width}], the columns of {ranks} rank(s)")
        valid = min(max(vocab - rank * width, 0), width)  # columns of this rank that are not padding
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        local = targets - rank * width
        mine = (local >= 0) & (local < valid)
        local = local.clamp(0, max(valid - 1, 0))

        # [4, n]: largest logit, sum of exp, sum of exp * shifted logit, the target's logit if it is here.
        parts = torch.zeros(4, count, dtype=dtype, device=hidden.device)
        parts[0] = torch.finfo(dtype).min
        chunks = _chunks(count, valid)
        kept = None
        for part in chunks:
            logits = hidden[part] @ weight[:valid].t()
            if len(chunks) == 1:
                kept = logits  # making it anew in the backward pass would save nothing
            shifted = _scaled(logits, dtype, scoring.temperature, overwrite=kept is None)
            parts[3, part] = torch.where(mine[part], shifted.gather(1, local[part, None])[:, 0], 0.0)
            largest = shifted.amax(dim=-1)
            shifted.sub_(largest[:, None]).clamp_(min=_LOWEST_SHIFTED)
            exp = shifted.exp()
            parts[0, part] = largest
            parts[1, part] = exp.sum(dim=-1)
            parts[2, part] = exp.mul_(shifted).sum(dim=-1)
            del logits, shifted, exp  # before the next chunk's come to be

        all_parts = parts[None]
        if ranks > 1:
            # One collective instead of a maximum and a sum; every rank then combines the same numbers in one order.
            all_parts = parts.new_empty(ranks, *parts.shape)
            dist.all_gather(list(all_parts), parts, group=tp_group)
        largest = all_parts[:, 0].amax(dim=0)
        offset = all_parts[:, 0] - largest  # [ranks, n]
        scale = offset.exp()
        sum_exp = (all_parts[:, 1] * scale).sum(dim=0)
        log_sum_exp = sum_exp.log()  # [n], of the shifted logits
        # In this order a large common offset of the logits costs no digits.
        log_probs = all_parts[:, 3].sum(dim=0).sub_(largest).sub_(log_sum_exp)
        log_probs.masked_fill_((targets < 0) | (targets >= vocab), float("nan"))
        weighted = ((all_parts[:, 2] + all_parts[:, 1] * offset.clamp(min=_LOWEST_SHIFTED)) * scale).sum(dim=0)
        entropy = log_sum_exp - weighted / sum_exp

        ctx.save_for_backward(hidden, weight, local, mine, largest, log_sum_exp, entropy, kept)
        ctx.tp_group, ctx.valid, ctx.temperature = tp_group, valid, scoring.temperature
        ctx.set_materialize_grads(False)
        if not scoring.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, mine, largest, log_sum_exp, entropy, kept = ctx.saved_tensors
        valid = ctx.valid
        chunks = _chunks(hidden.shape[0], valid)
        grad_hidden = torch.zeros_like(hidden)
        # Sums over chunks are kept in float32, as sums over micro-batches are.
        grad_weight = torch.zeros_like(weight, dtype=weight.dtype if len(chunks) < 2 else largest.dtype)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(largest)
        for part in chunks:
            logits = hidden[part] @ weight[:valid].t() if kept is None else kept
            log_p = _scaled(logits, largest.dtype, ctx.temperature, overwrite=kept is None)
            del logits
            log_p.sub_(largest[part, None]).sub_(log_sum_exp[part, None])
            if grad_entropy is None:
                grad = log_p.exp_().mul_(grad_log_probs[part, None])
            else:
                p = log_p.clamp_(min=_LOWEST_SHIFTED).exp()
                log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_probs[part, None])
                grad = log_p.mul_(p)
                del p
            at_target = torch.where(mine[part], -grad_log_probs[part], 0.0)
            grad = grad.scatter_add_(1, local[part, None], at_target[:, None]).mul_(-1.0 / ctx.temperature)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight[:valid], out=grad_hidden[part])
            if grad_weight.dtype == grad.dtype:
                grad_weight[:valid].addmm_(grad.t(), hidden[part])
            else:
                grad_weight[:valid] += grad.t() @ hidden[part]
            del log_p, grad
        if ctx.tp_group is not None and ctx.tp_group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.tp_group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _scaled(logits: Tensor, dtype: torch.dtype, temperature: float, overwrite: bool) -> Tensor:
    """The logits in `dtype`, over the temperature. overwrite: they are not needed any more."""
    if logits.dtype != dtype:
        return logits.to(dtype).div_(temperature)
    return logits.div_(temperature) if overwrite else logits / temperature


def _chunks(rows: int, columns: int) -> list[slice]:
    """Cuts rows into equal pieces of at most `_CHUNK_ELEMENTS` elements (or one row); none without columns."""
    if columns == 0 or rows == 0:
        return []
    most = max(1, _CHUNK_ELEMENTS // columns)
    step = -(-rows // -(-rows // most))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
