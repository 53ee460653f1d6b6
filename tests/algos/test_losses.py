from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megagent.algos.losses import (
    LOSS_METRICS,
    clipped_surrogate,
    loss_shares,
    mean_metrics,
    policy_loss,
    with_loss_columns,
)
from megagent.batch import Jagged, StepBatch
from megagent.config import AlgoConfig
from megagent.errors import MegagentError

ALGO = AlgoConfig(clip=0.2, entropy_coef=0.01, kl_coef=0.1)


def one(value: float) -> Tensor:
    return torch.tensor([value], requires_grad=True)


def loss_columns(
    old: Tensor, advantages: Tensor, lengths: Tensor, algo: AlgoConfig = ALGO, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """Columns of rows of these lengths, all tokens with loss unless a mask is given."""
    batch = StepBatch({"response_mask": Jagged(torch.ones(len(old)) if mask is None else mask, lengths)})
    batch = with_loss_columns(batch, algo)
    names = ("response_mask", "token_weights", "loss_rows")
    return {name: batch[name].values for name in names} | {"old_log_probs": old, "advantages": advantages}


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
    value, side, _ = clipped_surrogate(log_prob.exp(), torch.tensor([advantage]), AlgoConfig(clip=0.2))
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.tensor([loss]))
    torch.testing.assert_close(log_prob.grad, torch.tensor([gradient]))
    assert bool(side) is clipped


def test_the_upper_side_of_the_clip_may_be_wider() -> None:
    algo = AlgoConfig(clip=0.2, clip_high=0.28)
    value, side, _ = clipped_surrogate(torch.tensor([1.25, 1.5, 0.5]), torch.tensor([1.0, 1.0, -1.0]), algo)
    torch.testing.assert_close(value, torch.tensor([-1.25, -1.28, 0.8]))
    assert side.tolist() == [False, True, True]


def test_the_dual_clip_bounds_what_a_bad_token_counts() -> None:
    log_prob = one(math.log(8.0))
    value, _, bounded = clipped_surrogate(log_prob.exp(), torch.tensor([-2.0]), AlgoConfig(dual_clip=3.0))
    value.sum().backward()
    assert value.item() == pytest.approx(6.0)  # 2 x 3, where the ratio would make it 16
    assert bounded.tolist() == [True]
    assert log_prob.grad is not None
    assert log_prob.grad.item() == 0.0


def test_gspo_clips_by_the_ratio_of_the_whole_row() -> None:
    """Rows of ratios (1.44, 1) and (0.25, 1): geometric means 1.2 and 0.5, against a clip at 0.9 and 1.1."""
    algo = AlgoConfig(loss="gspo", clip=0.1, entropy_coef=0.0, kl_coef=0.0)
    log_probs = torch.log(torch.tensor([1.44, 1.0, 0.25, 1.0])).requires_grad_()
    columns = loss_columns(torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([2, 2]))
    loss, sums = policy_loss(log_probs, columns, None, algo, 4)
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(-(1.1 + 1.1 + 0.5 + 0.5) / 4))
    assert float(sums["actor/pg_clipfrac"]) == 2.0
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, 0.0, -0.5, -0.5]) / 4)


def test_cispo_still_teaches_a_clipped_token() -> None:
    algo = AlgoConfig(loss="cispo", clip=0.2, clip_high=0.3, entropy_coef=0.0, kl_coef=0.0)
    log_probs = torch.log(torch.tensor([0.5, 0.9])).requires_grad_()
    old = torch.log(torch.tensor([0.25, 0.9]))  # ratios 2 and 1
    loss, sums = policy_loss(log_probs, loss_columns(old, torch.tensor([1.0, -1.0]), torch.tensor([2])), None, algo, 2)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.3, 1.0]) / 2)
    assert float(sums["actor/pg_clipfrac"]) == 1.0


def test_the_loss_by_hand() -> None:
    """Two loss tokens with ratio 1: (-1 - 3) / 2 - 0.01 * (0.5 + 1.5) / 2 + 0.1 * 0."""
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    entropy = torch.tensor([0.5, 1.5, 9.0])
    mask = torch.tensor([1.0, 1.0, 0.0])
    columns = loss_columns(log_probs, torch.tensor([1.0, 3.0, 9.0]), torch.tensor([3]), mask=mask)
    loss, sums = policy_loss(log_probs, columns | {"ref_log_probs": log_probs}, entropy, ALGO, 2)
    torch.testing.assert_close(loss, torch.tensor(-2.0 - 0.01))
    means = mean_metrics(sums, 2)
    expected = dict.fromkeys(LOSS_METRICS, 0.0) | {"actor/pg_loss": -2.0, "actor/entropy": 1.0}
    assert means == pytest.approx(expected)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([3.0, -1.0])
    algo = AlgoConfig(entropy_coef=0.0, kl_coef=0.0)
    columns = loss_columns(log_probs.detach(), advantages, torch.tensor([1, 1]))
    loss, _ = policy_loss(log_probs, columns, None, algo, 2)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages / 2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 8) / 4),
        ("seq-mean-token-sum", (1 + 2 + 3 + 8) / 2),
        ("seq-mean-token-mean", (2 + 8) / 2),
    ],
)
def test_the_aggregations_by_hand(aggregation: str, expected: float) -> None:
    """A row of three loss tokens that lose 1, 2 and 3, one of a single token that loses 8, and one without any."""
    algo = AlgoConfig(aggregation=aggregation, entropy_coef=0.0, kl_coef=0.0)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    lengths = torch.tensor([4, 1, 1])
    batch = StepBatch({"response_mask": Jagged(mask, lengths)})
    columns = loss_columns(torch.zeros(6), -torch.tensor([1.0, 9, 2, 3, 8, 9]), lengths, algo, mask)
    loss, _ = policy_loss(torch.zeros(6), columns, None, algo, int(loss_shares(batch, algo).sum()))
    assert float(loss) == pytest.approx(expected)


# However the rows are dealt out, the sum is the same.

FORMS = [
    AlgoConfig(loss=loss, aggregation=aggregation, dual_clip=dual, entropy_coef=0.01, kl_coef=0.1, kl_estimator=kl)
    for loss, aggregation, dual, kl in (
        ("ppo", "token-mean", 3.0, "low_var_kl"),
        ("ppo", "seq-mean-token-mean", 0.0, "k1"),
        ("gspo", "seq-mean-token-mean", 0.0, "k2"),
        ("cispo", "seq-mean-token-sum", 0.0, "k3+"),
    )
]


def mini_batch(seed: int, rows: int) -> StepBatch:
    """Rows of 1 to 5 tokens, some without loss, and the features of which a small policy makes log-probs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (rows,), generator=generator)
    tokens = int(lengths.sum())
    names = ("old_log_probs", "ref_log_probs", "advantages", "weights", "scale")
    columns = {name: Jagged(torch.randn(tokens, generator=generator), lengths) for name in names}
    mask = (torch.rand(tokens, generator=generator) < 0.6).to(torch.float32)
    return StepBatch({**columns, "response_mask": Jagged(mask, lengths)})


def update(parts: list[StepBatch], algo: AlgoConfig) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of a small policy of 4 parameters in float64, summed over parts."""
    policy = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64, requires_grad=True)
    denominator = float(sum(loss_shares(part, algo).sum() for part in parts))
    total, sums = 0.0, dict.fromkeys(LOSS_METRICS, 0.0)
    for part in parts:
        part = with_loss_columns(part, algo)
        columns = {name: column.values for name, column in part.items()}
        log_probs = -((policy[0] + policy[1] * columns["weights"].double()) ** 2)
        entropy = (policy[2] + policy[3] * columns["scale"].double()) ** 2
        loss, metrics = policy_loss(log_probs, columns, entropy, algo, denominator)
        loss.backward()
        total += float(loss.detach())
        for name, value in metrics.items():
            sums[name] += float(value)
    assert policy.grad is not None
    return total, policy.grad, mean_metrics(sums, denominator)


@pytest.mark.parametrize("algo", FORMS, ids=lambda algo: f"{algo.loss} {algo.aggregation}")
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 12), parts=st.integers(1, 12))
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(
    algo: AlgoConfig, seed: int, rows: int, parts: int
) -> None:
    """Nor on the order: micro-batches and data-parallel ranks only decide which summands meet."""
    whole = mini_batch(seed, rows)
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, rows + 1, (parts - 1,), generator=generator).sort().values.tolist()
    shuffled = whole.take(torch.randperm(rows, generator=generator))
    pieces = [shuffled.take(list(range(start, stop))) for start, stop in zip([0, *cuts], [*cuts, rows], strict=True)]
    assert_same(update([whole], algo), update(pieces, algo))


@pytest.mark.parametrize("algo", FORMS, ids=lambda algo: f"{algo.loss} {algo.aggregation}")
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), extra=st.integers(1, 4))
def test_padding_rows_change_nothing_whatever_they_hold(algo: AlgoConfig, seed: int, rows: int, extra: int) -> None:
    whole = mini_batch(seed, rows)
    one_each = torch.ones(extra, dtype=torch.int64)
    junk = {name: 1e4 if name in ("weights", "scale") else math.nan for name in whole.names}
    junk["response_mask"] = 0.0
    padding = StepBatch({name: Jagged(torch.full((extra,), value), one_each) for name, value in junk.items()})
    assert_same(update([whole], algo), update([StepBatch.concat([padding, whole])], algo))


def test_a_mini_batch_of_padding_only_gives_a_loss_and_gradient_of_zero() -> None:
    part = mini_batch(0, 2)
    part = part.with_columns(response_mask=part["response_mask"].like(torch.zeros(part["response_mask"].tokens)))
    for algo in FORMS:
        loss, gradient, metrics = update([part], algo)
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
    columns = loss_columns(x, x, torch.tensor([1]))
    with pytest.raises(MegagentError, match=r"algo.entropy_coef=0.01 needs the entropy"):
        policy_loss(x, columns | {"ref_log_probs": x}, None, ALGO, 1)
    with pytest.raises(MegagentError, match=r"algo.kl_coef=0.1 needs the reference"):
        policy_loss(x, columns, x, ALGO, 1)


def test_a_kl_in_the_reward_is_a_figure_of_the_loss_and_no_part_of_it() -> None:
    x = torch.zeros(1)
    columns = loss_columns(x, torch.ones(1), torch.tensor([1])) | {"ref_log_probs": torch.ones(1)}
    algo = AlgoConfig(kl_in="reward", kl_coef=0.1, entropy_coef=0.0)
    loss, sums = policy_loss(x, columns, None, algo, 1)
    assert float(loss) == -1.0
    assert float(sums["actor/kl_loss"]) == pytest.approx(math.e - 2)


@pytest.mark.parametrize("wrong", [{"loss": "trpo"}, {"kl_estimator": "k9"}], ids=str)
def test_an_unknown_name_is_answered_with_the_known_ones(wrong: dict[str, str]) -> None:
    x = torch.zeros(1)
    [(key, value)] = wrong.items()
    columns = loss_columns(x, x, torch.tensor([1])) | {"ref_log_probs": x}
    with pytest.raises(MegagentError, match=rf"algo.{key}={value} is unknown; use "):
        policy_loss(x, columns, x, AlgoConfig(**wrong), 1)


def test_an_unknown_aggregation_is_answered_with_the_known_ones() -> None:
    batch = StepBatch({"response_mask": Jagged(torch.ones(1), torch.ones(1))})
    with pytest.raises(MegagentError, match=r"algo.aggregation=mean is unknown; use token-mean, "):
        with_loss_columns(batch, AlgoConfig(aggregation="mean"))
