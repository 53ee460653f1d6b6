"""Log-probs and entropy from hidden states, against torch on all logits: values, gradients, padding, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megagent.config import Config
from megagent.parallel import log_probs as subject
from megagent.parallel.log_probs import Scoring, token_log_probs
from tests.parallel import jobs
from tests.parallel.pool import RankPool

WIDTH = 40  # rows of the output layer over all ranks
WITH_ENTROPY = Scoring(entropy_gradient=True)


def golden(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, temperature: float = 1.0) -> tuple[Tensor, ...]:
    """The slow way, in float64, with all logits at once."""
    logits = hidden.double() @ weight[:vocab].double().t()
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def sample(vocab: int, tokens: int = 14) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [tokens, 6], weight [WIDTH, 6], targets [tokens] below vocab, and two gradients [tokens]."""
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = torch.randn(tokens, 6, generator=generator), torch.randn(WIDTH, 6, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)


def of_logits(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """An output layer that passes on what it gets: the logits [n, columns] are chosen by the test."""
    return token_log_probs(logits, torch.eye(logits.shape[1]), targets, None, vocab=vocab, scoring=WITH_ENTROPY)


def of_ranks(start: jobs.Start, config: Config, cases: list[tuple[int, Scoring, int]]) -> list[tuple[Tensor, ...]]:
    """A job: for each (vocab, scoring, elements of a chunk): log-probs, entropy, gradients of hidden and weight."""
    topology = start(config).topology
    found = []
    for vocab, scoring, elements in cases:
        subject._CHUNK_ELEMENTS = elements
        hidden, weight, targets, log_prob_grad, entropy_grad = sample(vocab)
        mine = weight.chunk(topology.tp_group.size())[topology.tp_group.rank()].clone().requires_grad_()
        hidden.requires_grad_()
        answer = token_log_probs(hidden, mine, targets, topology.tp_group, vocab=vocab, scoring=scoring)
        torch.autograd.backward(answer[: 1 + scoring.entropy_gradient], (log_prob_grad, entropy_grad)[: len(answer)])
        found.append((*(each.detach() for each in answer), hidden.grad, mine.grad))
    subject._CHUNK_ELEMENTS = 1 << 25
    return found


@pytest.mark.slow
def test_two_ranks_agree_with_torch_on_values_and_gradients(ranks: RankPool, tiny_model: Path) -> None:
    cases = [
        (WIDTH, WITH_ENTROPY, 1 << 25),
        (37, Scoring(0.7, entropy_gradient=True), 1 << 25),  # the last rank has padding
        (37, Scoring(0.7, entropy_gradient=True), 50),  # chunks of two tokens, made anew in the backward pass
        (9, WITH_ENTROPY, 1 << 25),  # the last rank has nothing but padding
    ]
    results = ranks.run(of_ranks, 2, config=jobs.make_config(tiny_model, tp=2), cases=cases)
    for number, (vocab, scoring, _) in enumerate(cases):
        hidden, weight, targets, *grads = sample(vocab)
        leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()
        expected = golden(*leaves, targets, vocab, scoring.temperature)
        torch.autograd.backward(expected, [grad.double() for grad in grads])
        for rank, result in enumerate(results):
            mine = weight.shape[0] // 2 * rank
            wanted = [*(each.detach() for each in expected), leaves[0].grad, leaves[1].grad[mine : mine + 20]]
            for got, want in zip(result[number], wanted, strict=True):
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(results[0][number][0], results[1][number][0])
        assert torch.equal(results[0][number][2], results[1][number][2])


def test_by_hand() -> None:
    log_probs, entropy = of_logits(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), vocab=2)
    assert log_probs.item() == pytest.approx(-0.313262, abs=1e-6)  # log(e / (1 + e))
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)


@pytest.mark.parametrize("elements", [1, 12, 1 << 25])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradients_are_those_of_finite_differences(
    elements: int, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_CHUNK_ELEMENTS", elements)
    targets = torch.tensor([0, 3, 2])
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def scored(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        scoring = Scoring(0.8, entropy_gradient=with_entropy)
        return token_log_probs(hidden, weight, targets, None, vocab=5, scoring=scoring)[: 1 + with_entropy]

    assert torch.autograd.gradcheck(scored, (hidden, weight))


def test_gradients_are_those_of_autograd_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_CHUNK_ELEMENTS", 100)
    hidden, weight, targets, log_prob_grad, entropy_grad = sample(37)
    found = []
    for way in (
        lambda h, w: golden(h, w, targets, 37),
        lambda h, w: token_log_probs(h, w, targets, None, vocab=37, scoring=WITH_ENTROPY),
    ):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, entropy = way(*leaves)
        ((log_probs * log_prob_grad).sum() + (entropy * entropy_grad).sum()).backward()
        found.append([leaf.grad for leaf in leaves])
    for mine, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


def test_an_entropy_that_is_only_looked_at_has_no_gradient() -> None:
    hidden, weight, targets, *_ = sample(37)
    log_probs, entropy = token_log_probs(hidden.requires_grad_(), weight, targets, None, vocab=37, scoring=Scoring())
    assert log_probs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_a_common_offset_of_the_logits_changes_nothing(offset: float) -> None:
    logits = torch.tensor([[-3.0, 0.0, 2.0, 5.0]])
    log_probs, entropy = of_logits(logits + offset, torch.tensor([2]), vocab=4)
    expected = golden(logits, torch.eye(4), torch.tensor([2]), 4)
    assert log_probs.item() == pytest.approx(expected[0].item(), abs=1e-6)
    assert entropy.item() == pytest.approx(expected[1].item(), abs=1e-6)


def test_padding_never_counts_however_large_its_weights() -> None:
    hidden, weight, targets, *_ = sample(30)
    plain = token_log_probs(hidden, weight[:30], targets, None, vocab=30, scoring=WITH_ENTROPY)
    weight[30:] = 1e6
    weight.requires_grad_()
    padded = token_log_probs(hidden, weight, targets, None, vocab=30, scoring=WITH_ENTROPY)
    assert torch.equal(plain[0], padded[0])
    assert torch.equal(plain[1], padded[1])
    (padded[0].sum() + padded[1].sum()).backward()
    assert weight.grad is not None
    assert not weight.grad[30:].any()


@pytest.mark.parametrize("target", [-100, 5, 7])
def test_a_target_outside_the_vocabulary_gives_nan_and_no_plausible_number(target: int) -> None:
    log_probs, _ = of_logits(torch.zeros(2, 8), torch.tensor([1, target]), vocab=5)
    assert log_probs[0].isfinite()
    assert log_probs[1].isnan()


def test_bf16_logits_are_reduced_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_CHUNK_ELEMENTS", 100)
    hidden, weight, targets, *_ = sample(WIDTH)
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, targets, None, vocab=WIDTH, scoring=WITH_ENTROPY)
    rounded = (hidden.detach() @ weight.detach().t()).float()
    expected = golden(rounded, torch.eye(WIDTH), targets, WIDTH)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-6, atol=1e-6)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_logits_of_several_chunks_are_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_CHUNK_ELEMENTS", 100)
    hidden, weight, targets, *_ = sample(37)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        token_log_probs(*leaves, targets, None, vocab=37, scoring=WITH_ENTROPY)
    assert {hidden.data_ptr(), weight.data_ptr()} <= {tensor.data_ptr() for tensor in kept}
    rest = [tensor for tensor in kept if tensor.data_ptr() not in (hidden.data_ptr(), weight.data_ptr())]
    assert all(tensor.numel() <= len(targets) for tensor in rest)


def test_shapes_that_do_not_fit_are_refused() -> None:
    targets = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        token_log_probs(torch.zeros(2, 8), torch.zeros(5, 8), targets, None, vocab=5, scoring=Scoring())
    with pytest.raises(ValueError, match="vocab=9"):
        token_log_probs(torch.zeros(3, 8), torch.zeros(8, 8), targets, None, vocab=9, scoring=Scoring())
