from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megagent.algos.adjust import align
from megagent.algos.correction import correct_for_sampler, correction_metrics, sampler_ratios
from megagent.algos.losses import loss_shares, policy_loss, with_loss_columns
from megagent.batch import Jagged, StepBatch
from megagent.config import AlgoConfig
from megagent.errors import MegagentError

HALF, TWO, FOUR = (math.log(x) for x in (0.5, 2.0, 4.0))


@pytest.fixture
def batch() -> StepBatch:
    """Ratios of 4, 1/2 and (without loss) 4 in the first row, 2 in the second; advantages 1 and -1."""
    lengths = torch.tensor([3, 1])
    return StepBatch(
        {
            "response_mask": Jagged(torch.tensor([1.0, 1.0, 0.0, 1.0]), lengths),
            "old_log_probs": Jagged(torch.tensor([FOUR, HALF, FOUR, TWO]) - 5.0, lengths),
            "rollout_log_probs": Jagged(torch.full((4,), -5.0), lengths),
            "advantages": Jagged(torch.tensor([1.0, 1.0, 0.0, -1.0]), lengths),
        }
    )


def test_ratios_of_tokens_and_of_whole_rows(batch: StepBatch) -> None:
    torch.testing.assert_close(sampler_ratios(batch, "token").values, torch.tensor([4.0, 0.5, 1.0, 2.0]))
    torch.testing.assert_close(sampler_ratios(batch, "sequence").values, torch.tensor([2.0, 2.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("correction", "advantages", "mask"),
    [
        ("none", [1.0, 1.0, 0.0, -1.0], [1, 1, 0, 1]),
        ("token_tis", [3.0, 0.5, 0.0, -2.0], [1, 1, 0, 1]),
        ("sequence_tis", [2.0, 2.0, 0.0, -2.0], [1, 1, 0, 1]),
        ("token_mask", [0.0, 0.0, 0.0, -1.0], [0, 0, 0, 1]),
        ("sequence_mask", [1.0, 1.0, 0.0, -1.0], [1, 1, 0, 1]),
    ],
)
def test_the_corrections_by_hand(batch: StepBatch, correction: str, advantages: list[float], mask: list[float]) -> None:
    algo = AlgoConfig(sampler_correction=correction, sampler_ratio_max=3.0, sampler_ratio_min=0.6)
    corrected = correct_for_sampler(batch, algo)
    torch.testing.assert_close(corrected["advantages"].values, torch.tensor(advantages))
    assert corrected["response_mask"].values.tolist() == mask


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_weight_in_the_advantage_is_a_weight_of_the_loss(batch: StepBatch, loss: str) -> None:
    """Also where the surrogate is clipped: each token's loss is its weight times what it was."""
    algo = AlgoConfig(
        loss=loss, sampler_correction="token_tis", sampler_ratio_max=3.0, entropy_coef=0.0, kl_coef=0.0,
        dual_clip=3.0 if loss == "ppo" else 0.0,
    )  # fmt: skip
    log_probs = batch["old_log_probs"].values + torch.tensor([0.5, -0.5, 0.0, 2.0])

    def of_tokens(rows: StepBatch) -> Tensor:
        rows = with_loss_columns(rows, algo)
        columns = {name: column.values for name, column in rows.items()}
        probe = columns["token_weights"].clone().requires_grad_()
        value, _ = policy_loss(log_probs, columns | {"token_weights": probe}, None, algo, 1)
        return torch.autograd.grad(value, probe)[0]

    weights = sampler_ratios(batch, "token").values.clamp(max=3.0)
    torch.testing.assert_close(of_tokens(correct_for_sampler(batch, algo)), weights * of_tokens(batch))


def test_what_is_masked_leaves_the_denominator(batch: StepBatch) -> None:
    algo = AlgoConfig(sampler_correction="token_mask", sampler_ratio_max=3.0, sampler_ratio_min=0.6)
    assert loss_shares(correct_for_sampler(batch, algo), algo).tolist() == [0, 1]


def test_figures_are_there_without_a_correction(batch: StepBatch) -> None:
    metrics = correction_metrics(batch, AlgoConfig(sampler_ratio_max=3.0, sampler_ratio_min=0.6))
    assert metrics["sampler/ratio/max"] == pytest.approx(4.0)
    assert metrics["sampler/ratio/above_max"] == pytest.approx(1 / 3)
    assert metrics["sampler/ratio/below_min"] == pytest.approx(1 / 3)
    assert metrics["sampler/ess"] == pytest.approx(6.5**2 / (16 + 0.25 + 4) / 3)


def test_one_policy_has_a_ratio_of_one_and_loses_no_sample(random_batch: Callable[..., StepBatch]) -> None:
    batch = random_batch()
    batch = align(batch.with_columns(old_log_probs=batch["rollout_log_probs"]), 64)
    metrics = correction_metrics(batch, AlgoConfig())
    assert metrics["sampler/ess"] == pytest.approx(1.0)
    assert metrics["sampler/ratio/above_max"] == 0.0


def test_the_share_of_masked_tokens_is_told(batch: StepBatch) -> None:
    algo = AlgoConfig(sampler_correction="token_mask", sampler_ratio_max=3.0, sampler_ratio_min=0.6)
    assert correction_metrics(correct_for_sampler(batch, algo), algo)["sampler/masked_ratio"] == pytest.approx(2 / 3)


def test_an_unknown_correction_is_answered_with_the_known_ones(batch: StepBatch) -> None:
    with pytest.raises(MegagentError, match=r"algo.sampler_correction=tis is unknown; use token_tis, "):
        correct_for_sampler(batch, AlgoConfig(sampler_correction="tis"))
