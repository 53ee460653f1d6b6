from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megagent.algos.losses import LOSS_METRICS, low_var_kl, mean_metrics, ppo_clip_loss, ppo_loss
from megagent.config import AlgoConfig
from megagent.errors import MegagentError

ALGO = AlgoConfig(clip=0.2, entropy_coef=0.01, kl_coef=0.1)


def one(value: float) -> Tensor:
    return torch.tensor([value], requires_grad=True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, False, -2.0),
        (1.5, 2.0, -2.4, True, 0.0),  # already likelier than the clip allows: no further push
        (0.5, 2.0, -1.0, False, -1.0),  # good and less likely than before: pulled back freely
        (0.5, -2.0, 1.6, True, 0.0),
        (1.5, -2.0, 3.0, False, 3.0),
    ],
)
def test_the_clipped_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, clipped: bool, gradient: float
) -> None:
    log_prob = one(math.log(ratio))
    value, side, log_ratio = ppo_clip_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), 0.2)
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.tensor([loss]))
    torch.testing.assert_close(log_prob.grad, torch.tensor([gradient]))
    assert bool(side) is clipped
    torch.testing.assert_close(log_ratio.detach(), torch.tensor([math.log(ratio)]))


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


def test_the_loss_by_hand() -> None:
    """Two loss tokens with ratio 1: (-1 - 3) / 2 - 0.01 * (0.5 + 1.5) / 2 + 0.1 * 0."""
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    mask = torch.tensor([1.0, 1.0, 0.0])
    entropy = torch.tensor([0.5, 1.5, 9.0])
    loss, sums = ppo_loss(log_probs, log_probs, torch.tensor([1.0, 3.0, 9.0]), mask, entropy, log_probs, ALGO, 2)
    torch.testing.assert_close(loss, torch.tensor(-2.0 - 0.01))
    means = mean_metrics(sums, 2)
    expected = dict.fromkeys(LOSS_METRICS, 0.0) | {"actor/pg_loss": -2.0, "actor/entropy": 1.0}
    assert means == pytest.approx(expected)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([3.0, -1.0])
    algo = AlgoConfig(entropy_coef=0.0, kl_coef=0.0)
    loss, _ = ppo_loss(log_probs, log_probs.detach(), advantages, torch.ones(2), None, None, algo, 2)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages / 2)


# However the rows are dealt out, the sum is the same.


def mini_batch(seed: int, rows: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    mask = (torch.rand(rows, tokens, generator=generator) < 0.6).to(torch.float32)
    names = ("weights", "old_log_probs", "advantages", "ref_log_probs")
    return {name: random() for name in names} | {"mask": mask, "scale": random()}


def update(parts: list[dict[str, Tensor]], denominator: float | Tensor) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of a small policy of 4 parameters, summed over parts."""
    policy = torch.linspace(-1.0, 1.0, 4, requires_grad=True)
    total, sums = 0.0, dict.fromkeys(LOSS_METRICS, 0.0)
    for part in parts:
        log_probs = -((policy[:2] * part["weights"][..., None].float()).sum(-1) ** 2)
        entropy = (policy[2:] * part["scale"][..., None].float()).sum(-1).square()
        columns = [part[name].float() for name in ("old_log_probs", "advantages", "mask")]
        loss, metrics = ppo_loss(log_probs, *columns, entropy, part["ref_log_probs"].float(), ALGO, denominator)
        loss.backward()
        total += float(loss.detach())
        for name, value in metrics.items():
            sums[name] += float(value)
    assert policy.grad is not None
    return total, policy.grad, mean_metrics(sums, denominator)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 12), parts=st.integers(1, 12))
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(seed: int, rows: int, parts: int) -> None:
    whole = mini_batch(seed, rows, tokens=5)
    denominator = float(whole["mask"].sum())
    cuts = torch.randint(0, rows + 1, (parts - 1,), generator=torch.Generator().manual_seed(seed)).sort().values
    pieces = [
        {name: column[start:stop] for name, column in whole.items()}
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), rows], strict=True)
    ]
    assert_same(update([whole], denominator), update(pieces, denominator))


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), extra=st.integers(1, 4))
def test_padding_rows_and_columns_change_nothing_whatever_they_hold(seed: int, rows: int, extra: int) -> None:
    whole = mini_batch(seed, rows, tokens=5)
    denominator = torch.tensor(float(whole["mask"].sum()))
    filled = {}
    for name, column in whole.items():
        junk = 0.0 if name == "mask" else 1e4 if name in ("weights", "scale") else math.nan
        filled[name] = torch.full((rows + extra, 5 + extra), junk, dtype=column.dtype)
        filled[name][:rows, :5] = column
    assert_same(update([whole], denominator), update([filled], denominator))


def test_a_mini_batch_of_padding_only_gives_a_loss_and_gradient_of_zero() -> None:
    part = mini_batch(0, 2, 3)
    part["mask"] = torch.zeros(2, 3)
    loss, gradient, metrics = update([part], 0.0)
    assert loss == 0.0
    assert not gradient.any()
    assert metrics == dict.fromkeys(LOSS_METRICS, 0.0)


def assert_same(left: tuple[float, Tensor, dict[str, float]], right: tuple[float, Tensor, dict[str, float]]) -> None:
    assert right[0] == pytest.approx(left[0], rel=1e-6, abs=1e-6)
    scale = float(left[1].abs().max()) + 1.0
    assert float((left[1] - right[1]).abs().max()) / scale < 1e-6
    assert right[2] == pytest.approx(left[2], rel=1e-5, abs=1e-6)


def test_a_term_with_a_weight_needs_its_input() -> None:
    x = torch.zeros(1)
    with pytest.raises(MegagentError, match=r"algo.entropy_coef=0.01 needs the entropy"):
        ppo_loss(x, x, x, x, None, x, ALGO, 1)
    with pytest.raises(MegagentError, match=r"algo.kl_coef=0.1 needs the reference"):
        ppo_loss(x, x, x, x, x, None, ALGO, 1)


def test_an_unknown_kl_estimator_is_named() -> None:
    x = torch.zeros(1)
    with pytest.raises(MegagentError, match=r"algo.kl_estimator=k9 is unknown; use low_var_kl"):
        ppo_loss(x, x, x, x, x, x, AlgoConfig(kl_estimator="k9"), 1)
