from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megagent.algos.adjust import align, real_rows
from megagent.algos.credit import charge, credit, step_returns
from megagent.algos.kl import (
    KL_COEF_METRIC,
    KL_METRIC,
    adapted_kl_coef,
    charge_kl,
    full_kl,
    kl_estimator,
    low_var_kl,
    mean_kl,
    resumed_kl_coef,
)
from megagent.algos.rewards import place_episode_reward
from megagent.batch import StepBatch
from megagent.config import AlgoConfig


def one(value: float) -> Tensor:
    return torch.tensor([value], requires_grad=True)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("k1", -0.5, 1.0),
        ("k2", 0.125, -0.5),
        ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("low_var_kl", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k1+", -0.5, -0.5),
        ("k3+", math.exp(0.5) - 1.5, -0.5),
        ("low_var_kl+", math.exp(0.5) - 1.5, -0.5),
    ],
)
def test_the_estimators_by_hand(name: str, value: float, gradient: float) -> None:
    log_prob = one(-1.5)
    kl = kl_estimator(name)(log_prob, torch.tensor([-1.0]))
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(gradient)


def test_low_var_kl_by_hand() -> None:
    kl = low_var_kl(torch.log(torch.tensor([0.5, 0.2])), torch.log(torch.tensor([0.5, 0.4])))
    torch.testing.assert_close(kl, torch.tensor([0.0, 2.0 - math.log(2.0) - 1.0]))


def test_low_var_kl_is_held_to_its_limits() -> None:
    log_prob = one(-300.0)
    kl = low_var_kl(log_prob, torch.zeros(1))
    kl.backward()
    assert kl.item() == 10.0
    assert log_prob.grad is not None
    assert log_prob.grad.item() == 0.0


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=10), st.lists(st.floats(-30, 0), min_size=1, max_size=10))
def test_low_var_kl_is_never_negative(log_probs: list[float], ref: list[float]) -> None:
    n = min(len(log_probs), len(ref))
    assert bool((low_var_kl(torch.tensor(log_probs[:n]), torch.tensor(ref[:n])) >= -1e-6).all())


def test_the_exact_kl_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    torch.testing.assert_close(full_kl(p.log(), q.log()), torch.tensor([expected]))


@given(seed=st.integers(0, 10**6))
def test_in_expectation_k1_and_k3_are_the_exact_kl_and_k2_has_its_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, ref = 0.5 * torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(-1), ref.log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    p = log_p.detach().exp()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimator(name)(log_p, log_q)).sum(), exact)
    [gradient] = torch.autograd.grad(exact, logits, retain_graph=True)
    [of_k2] = torch.autograd.grad((p * kl_estimator("k2")(log_p, log_q)).sum(), logits)
    torch.testing.assert_close(of_k2, gradient)


@pytest.fixture
def known(random_batch: Callable[..., StepBatch]) -> StepBatch:
    batch = random_batch()
    mask = batch["response_mask"]
    generator = torch.Generator().manual_seed(1)
    old, ref = (mask.like(-torch.rand(mask.tokens, generator=generator)) for _ in range(2))
    return batch.with_columns(old_log_probs=old, ref_log_probs=ref)


def test_the_reward_is_less_by_the_kl_of_each_loss_token(known: StepBatch) -> None:
    batch = place_episode_reward(known)
    charged = charge_kl(batch, "k1", 0.5)["token_rewards"].values
    kl = (batch["old_log_probs"].values - batch["ref_log_probs"].values) * batch["response_mask"].values
    torch.testing.assert_close(charged, batch["token_rewards"].values - 0.5 * kl)
    assert mean_kl(batch, "k1") == pytest.approx(float(kl.sum() / batch["response_mask"].values.sum()))


def test_padding_changes_no_kl(known: StepBatch) -> None:
    algo = AlgoConfig(kl_in="reward", kl_coef=0.5)
    aligned = align(step_returns(known, algo), 64)
    assert mean_kl(aligned, "k3") == pytest.approx(mean_kl(known, "k3"))
    credited = real_rows(charge(place_episode_reward(aligned), algo))
    assert torch.equal(credited["advantages"].values, credit(known, algo)["advantages"].values)
    without = credit(known, AlgoConfig(kl_coef=0.0))["advantages"].values
    assert not torch.allclose(credited["advantages"].values, without)


def test_the_coefficient_rises_above_the_target_and_falls_below_it() -> None:
    algo = AlgoConfig(kl_target=0.1, kl_horizon=1000)
    assert adapted_kl_coef(0.2, 0.11, 128, algo) == pytest.approx(0.2 * (1 + 0.1 * 0.128))
    assert adapted_kl_coef(0.2, 9.0, 128, algo) == pytest.approx(0.2 * (1 + 0.2 * 0.128))
    assert adapted_kl_coef(0.2, 0.0, 128, algo) == pytest.approx(0.2 * (1 - 0.2 * 0.128))
    assert adapted_kl_coef(0.2, 9.0, 128, AlgoConfig()) == 0.2


def test_a_resumed_run_goes_on_with_the_coefficient_it_had() -> None:
    algo = AlgoConfig(kl_target=0.1, kl_coef=0.3, kl_in="reward")
    coef, records = resumed_kl_coef([], 64, algo), []
    assert coef == 0.3
    for kl in (0.2, 0.05, 0.4):
        records.append({"step": len(records) + 1, KL_METRIC: kl, KL_COEF_METRIC: coef})
        coef = adapted_kl_coef(coef, kl, 64, algo)
    assert resumed_kl_coef([*records, {"val/sampled/tasks": 3}], 64, algo) == coef


def test_a_resumed_run_without_a_target_takes_the_coefficient_of_its_configuration() -> None:
    algo = AlgoConfig(kl_in="reward", kl_coef=0.5)
    assert resumed_kl_coef([{"step": 1, KL_METRIC: 0.2, KL_COEF_METRIC: 0.1}], 64, algo) == 0.5
