"""Vocabulary-parallel log-probs and entropy against torch on all columns: values, gradients, padding, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagent.config import Config
from megagent.parallel import log_probs as subject
from megagent.parallel.log_probs import (
    vocab_parallel_entropy,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
)
from tests.parallel import jobs
from tests.parallel.pool import RankPool

WIDTH = 40  # columns over all ranks


def golden(logits: Tensor, targets: Tensor, vocab: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The slow way, in float64, on logits [..., all columns]."""
    log_p = torch.log_softmax(logits[..., :vocab].double() / temperature, dim=-1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def sample(vocab: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [2, 7, WIDTH], targets [2, 7] below vocab, and two gradients [2, 7] to send back."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, 7, WIDTH, generator=generator) * scale
    targets = torch.randint(0, vocab, (2, 7), generator=generator)
    return logits, targets, torch.randn(2, 7, generator=generator), torch.randn(2, 7, generator=generator)


def of_ranks(start: jobs.Start, config: Config, options: dict[str, Any]) -> tuple[int, Tensor, Tensor, Tensor | None]:
    """A job: tensor-parallel rank, log-probs, entropy, and the gradient of this rank's columns."""
    topology = start(config).topology
    logits, targets, log_prob_grad, entropy_grad = sample(options["vocab"])
    mine = logits.chunk(topology.tp, dim=-1)[topology.tp_rank].clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(mine * 1, targets, topology.tp_group, **options)
    ((log_probs * log_prob_grad).sum() + (entropy * entropy_grad).sum()).backward()
    return topology.tp_rank, log_probs.detach(), entropy.detach(), mine.grad


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"vocab": WIDTH},
        {"vocab": 37, "temperature": 0.7},  # the last rank has padding
        {"vocab": 9},  # ranks that have nothing but padding
        {"vocab": 37, "consume": True},
    ],
    ids=["full", "padded", "empty-ranks", "consume"],
)
def test_ranks_agree_with_torch_on_values_and_gradients(
    ranks: RankPool, tiny_model: Path, tp: int, options: dict[str, Any]
) -> None:
    results = ranks.run(of_ranks, tp, config=jobs.make_config(tiny_model, tp), options=options)
    logits, targets, log_prob_grad, entropy_grad = sample(options["vocab"])
    whole = logits.double().requires_grad_()
    expected = golden(whole, targets, options["vocab"], options.get("temperature", 1.0))
    ((expected[0] * log_prob_grad).sum() + (expected[1] * entropy_grad).sum()).backward()
    assert whole.grad is not None
    for rank, log_probs, entropy, gradient in results:
        torch.testing.assert_close(log_probs.double(), expected[0].detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(entropy.double(), expected[1].detach(), rtol=1e-6, atol=1e-6)
        part = whole.grad.chunk(tp, dim=-1)[rank]
        torch.testing.assert_close(gradient.double(), part, rtol=1e-6, atol=1e-6)
    first = results[0]
    assert all(torch.equal(first[1], other[1]) and torch.equal(first[2], other[2]) for other in results)


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([1]), None, vocab=2)
    assert log_probs.item() == pytest.approx(-0.313262, abs=1e-6)  # log(e / (1 + e))
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)


def test_gradients_of_both_outputs_are_those_of_finite_differences() -> None:
    targets = torch.tensor([0, 3, 2])
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return vocab_parallel_log_probs_and_entropy(x, targets, None, vocab=5, temperature=0.8)

    assert torch.autograd.gradcheck(both, logits)
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_log_probs(x, targets, None, vocab=5), logits)
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_entropy(x, None, vocab=5), logits)


def test_each_alone_equals_both_together() -> None:
    logits, targets, _, _ = sample(37)
    both = vocab_parallel_log_probs_and_entropy(logits, targets, None, vocab=37)
    assert torch.equal(vocab_parallel_log_probs(logits, targets, None, vocab=37), both[0])
    assert torch.equal(vocab_parallel_entropy(logits, None, vocab=37), both[1])


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_a_common_offset_of_the_logits_changes_nothing(offset: float) -> None:
    logits = torch.tensor([[-3.0, 0.0, 2.0, 5.0]])
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits + offset, torch.tensor([2]), None, vocab=4)
    expected = golden(logits, torch.tensor([2]), 4)
    assert log_probs.item() == pytest.approx(expected[0].item(), abs=1e-6)
    assert entropy.item() == pytest.approx(expected[1].item(), abs=1e-6)


def test_padding_never_counts_however_large_its_logits() -> None:
    logits, targets, _, _ = sample(30)
    plain = vocab_parallel_log_probs_and_entropy(logits[..., :30].contiguous(), targets, None, vocab=30)
    logits[..., 30:] = 1e6
    logits.requires_grad_()
    padded = vocab_parallel_log_probs_and_entropy(logits, targets, None, vocab=30)
    assert torch.equal(plain[0], padded[0])
    assert torch.equal(plain[1], padded[1])
    (padded[0].sum() + padded[1].sum()).backward()
    assert logits.grad is not None
    assert not logits.grad[..., 30:].any()


def test_forbidden_entries_have_probability_zero_and_no_gradient() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]], requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([2]), None, vocab=3)
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)
    (log_probs + entropy).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0


@pytest.mark.parametrize("target", [-100, 5, 7])
def test_a_target_outside_the_vocabulary_gives_nan_and_no_plausible_number(target: int) -> None:
    log_probs = vocab_parallel_log_probs(torch.zeros(2, 8), torch.tensor([1, target]), None, vocab=5)
    assert log_probs[0].isfinite()
    assert log_probs[1].isnan()


def test_the_size_of_chunks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets, _, _ = sample(37)
    results = []
    for elements in (1, 100, 1 << 25):
        monkeypatch.setattr(subject, "_CHUNK_ELEMENTS", elements)
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(leaf, targets, None, vocab=37)
        (log_probs.sum() + entropy.sum()).backward()
        assert leaf.grad is not None
        results.append((log_probs.detach(), entropy.detach(), leaf.grad))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-7)


def test_bf16_logits_are_reduced_in_float32() -> None:
    logits, targets, _, _ = sample(WIDTH)
    half = logits.bfloat16().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(half, targets, None, vocab=WIDTH)
    expected = golden(half.detach(), targets, WIDTH)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=1e-6, atol=1e-6)
    (log_probs.sum() + entropy.sum()).backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_consume_puts_the_gradient_where_the_logits_were() -> None:
    logits, targets, _, _ = sample(37)
    leaf = logits.clone().requires_grad_()
    consumed = leaf * 1
    vocab_parallel_log_probs(consumed, targets, None, vocab=37, consume=True).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(consumed.detach(), leaf.grad)


def test_other_users_of_consumed_logits_get_an_error_not_wrong_gradients() -> None:
    logits, targets, _, _ = sample(37)
    leaf = logits.clone().requires_grad_()
    shared = leaf * 1
    squares = (shared * shared).sum()  # its gradient needs the logits, which are gone by then
    log_probs = vocab_parallel_log_probs(shared, targets, None, vocab=37, consume=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (log_probs.sum() + squares).backward()


def test_nothing_of_the_size_of_the_logits_is_kept_but_the_logits() -> None:
    logits, targets, _, _ = sample(37)
    leaf = logits.clone().requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vocab_parallel_log_probs_and_entropy(leaf, targets, None, vocab=37)
    large = [tensor for tensor in kept if tensor.numel() >= leaf.numel()]
    assert len(large) == 1
    assert large[0].data_ptr() == leaf.data_ptr()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        vocab_parallel_log_probs(torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64), None, vocab=8)
    with pytest.raises(ValueError, match="vocab=9"):
        vocab_parallel_log_probs(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), None, vocab=9)
