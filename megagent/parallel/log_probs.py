"""Log-probability and entropy of tokens whose logits are split over the tensor-parallel ranks by vocabulary.

Every rank reduces its own columns to a few numbers a token, one all-gather shares them, and each rank combines them
in rank order: no rank sees the whole vocabulary, and all ranks return the same bits. The gradients are written out by
hand, so that nothing of the size of the logits but the logits themselves is kept between forward and backward.

With x the logits divided by the temperature, p = softmax(x), H the entropy and t the target:
    d log p_t / d x_j = [j = t] - p_j
    d H       / d x_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of the logits that are widened to float32 at once; bounds the scratch memory (128 MiB), whatever the batch.
_CHUNK_ELEMENTS = 1 << 25
# exp() of anything below is 0 in float32 and in float64; without the floor a logit of -inf would make 0 * -inf in H.
_LOWEST_SHIFTED = -1000.0


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab: int,
    temperature: float = 1.0,
    consume: bool = False,
) -> Tensor:
    """Log-probability of each target token.

    logits: [..., v / tp] this rank's columns, any float dtype, padded vocabulary included; targets: [...] int64 token
    ids in [0, vocab); tp_group: the tensor-parallel group, None for a single rank; vocab: number of real entries, the
    columns from there on are padding and have probability 0; temperature divides the logits, as in sampling; consume:
    the backward pass may overwrite `logits` with their gradient (whoever else needs them then gets autograd's error).
    Returns [...] float32 (float64 for float64 logits). A target outside [0, vocab) gives NaN, never a plausible number.
    Collective over tp_group; backward is not.
    """
    log_probs, _ = _VocabParallel.apply(logits, targets, tp_group, vocab, temperature, consume, False)
    return log_probs


def vocab_parallel_entropy(
    logits: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab: int,
    temperature: float = 1.0,
    consume: bool = False,
) -> Tensor:
    """Entropy in nats of each token's distribution; arguments and result as in `vocab_parallel_log_probs`."""
    targets = logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    _, entropy = _VocabParallel.apply(logits, targets, tp_group, vocab, temperature, consume, True)
    return entropy


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab: int,
    temperature: float = 1.0,
    consume: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both of the above for the price of one: one pass over the logits, one all-gather, one backward pass."""
    return _VocabParallel.apply(logits, targets, tp_group, vocab, temperature, consume, True)


class _VocabParallel(torch.autograd.Function):
    """(log_probs, entropy) of vocabulary-parallel logits; entropy is empty unless asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        tp_group: dist.ProcessGroup | None,
        vocab: int,
        temperature: float,
        consume: bool,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        ranks, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
        if targets.shape != logits.shape[:-1]:
            raise ValueError(f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}")
        if not 0 < vocab <= ranks * width:
            raise ValueError(f"vocab={vocab} must be in [1, {ranks * width}], the columns of {ranks} rank(s)")
        valid = min(max(vocab - rank * width, 0), width)  # columns of this rank that are not padding
        dtype = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.reshape(-1, width)
        flat_targets = targets.reshape(-1)
        local = flat_targets - rank * width
        mine = (local >= 0) & (local < valid)
        local = local.clamp(0, width - 1)

        # [4, rows]: largest logit, sum of exp, sum of exp * shifted logit, the target's logit if it is here.
        parts = torch.zeros(4, rows.shape[0], dtype=dtype, device=logits.device)
        parts[0] = torch.finfo(dtype).min
        parts[3] = torch.where(mine, rows.gather(1, local[:, None])[:, 0].to(dtype) / temperature, 0.0)
        for part in _chunks(rows.shape[0], valid):
            shifted = rows[part, :valid].to(dtype, copy=True).div_(temperature)
            largest = shifted.amax(dim=-1).clamp_(min=torch.finfo(dtype).min)
            shifted.sub_(largest[:, None]).clamp_(min=_LOWEST_SHIFTED)
            parts[0, part] = largest
            if with_entropy:
                exp = shifted.exp()
                parts[1, part] = exp.sum(dim=-1)
                parts[2, part] = exp.mul_(shifted).sum(dim=-1)
            else:
                parts[1, part] = shifted.exp_().sum(dim=-1)

        all_parts = parts[None]
        if ranks > 1:
            # One collective instead of a maximum and a sum; every rank then combines the same numbers in one order.
            all_parts = parts.new_empty(ranks, *parts.shape)
            dist.all_gather(list(all_parts), parts, group=tp_group)
        largest = all_parts[:, 0].amax(dim=0)
        offset = all_parts[:, 0] - largest  # [ranks, rows]
        scale = offset.exp()
        sum_exp = (all_parts[:, 1] * scale).sum(dim=0)
        log_sum_exp = sum_exp.log()  # [rows], of the shifted logits
        # In this order a large common offset of the logits costs no digits.
        log_probs = all_parts[:, 3].sum(dim=0).sub_(largest).sub_(log_sum_exp)
        log_probs.masked_fill_((flat_targets < 0) | (flat_targets >= vocab), float("nan"))
        entropy = log_probs.new_empty(0)
        if with_entropy:
            weighted = ((all_parts[:, 2] + all_parts[:, 1] * offset.clamp(min=_LOWEST_SHIFTED)) * scale).sum(dim=0)
            entropy = log_sum_exp - weighted / sum_exp

        ctx.save_for_backward(logits, local, mine, largest, log_sum_exp, entropy)
        ctx.valid, ctx.temperature, ctx.consume = valid, temperature, consume
        ctx.set_materialize_grads(False)
        shape = targets.shape
        return log_probs.reshape(shape), entropy.reshape(shape) if with_entropy else entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        logits, local, mine, largest, log_sum_exp, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        width, valid = logits.shape[-1], ctx.valid
        source = logits.detach().reshape(-1, width)
        grad_logits = source if ctx.consume else torch.empty_like(source)
        for part in _chunks(source.shape[0], valid):
            log_p = source[part, :valid].to(largest.dtype, copy=True).div_(ctx.temperature)
            log_p.sub_(largest[part, None]).sub_(log_sum_exp[part, None]).clamp_(min=_LOWEST_SHIFTED)
            p = log_p.exp()
            if grad_entropy is not None:
                factor = log_p.add_(entropy[part, None]).mul_(grad_entropy.reshape(-1)[part, None])
                if grad_log_probs is not None:
                    factor.add_(grad_log_probs.reshape(-1)[part, None])
                grad = p.mul_(factor).neg_()
            elif grad_log_probs is not None:
                grad = p.mul_(grad_log_probs.reshape(-1)[part, None]).neg_()
            if grad_log_probs is not None and valid:
                at_target = torch.where(mine[part], grad_log_probs.reshape(-1)[part], 0.0)
                grad.scatter_add_(1, local[part, None].clamp(max=valid - 1), at_target[:, None])
            grad_logits[part, :valid] = grad.div_(ctx.temperature)
        grad_logits[:, valid:] = 0
        return grad_logits.reshape(logits.shape), None, None, None, None, None, None


def _chunks(rows: int, columns: int) -> list[slice]:
    """Cuts rows into pieces of at most `_CHUNK_ELEMENTS` elements (but at least one row); none without columns."""
    if columns == 0:
        return []
    step = max(1, _CHUNK_ELEMENTS // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
