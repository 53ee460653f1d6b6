"""What a rollout says about the sampler: figures small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from megagent.batch import Jagged, StepBatch, objects
from megagent.envs.base import Task
from megagent.errors import InfrastructureError
from megagent.rollout.episode import Episode, Step
from megagent.rollout.metrics import ROWS_NAMED, disagreement, require_version, sampler_metrics


def batch(differences: list[list[float]], masked: Collection[tuple[int, int]] = ()) -> StepBatch:
    """One row for each list; differences: sampler's log-prob less trainer's; masked: (row, token) without loss."""
    trainer = Jagged.from_list([torch.full((len(row),), -2.0, dtype=torch.float64) for row in differences])
    offset = torch.tensor([each for row in differences for each in row], dtype=torch.float64)
    mask = [[float((r, t) not in masked) for t in range(len(row))] for r, row in enumerate(differences)]
    return StepBatch(
        {
            "responses": trainer.like(torch.zeros(trainer.tokens, dtype=torch.int64)),
            "response_mask": trainer.like(torch.tensor([each for row in mask for each in row])),
            "old_log_probs": trainer,
            "rollout_log_probs": trainer.like(trainer.values + offset),
            "traj_uid": objects([f"goal/{row}" for row in range(len(differences))]),
            "step_index": torch.zeros(len(differences), dtype=torch.int64),
        }
    )


def test_differences_are_of_the_loss_tokens() -> None:
    found = sampler_metrics(batch([[0.1, -0.3], [50.0, 0.2]], masked={(1, 0)}))
    assert found["sampler/log_prob_diff/mean"] == pytest.approx(0.2)
    assert found["sampler/log_prob_diff/max"] == pytest.approx(0.3)


def test_one_token_in_a_hundred_may_exceed_the_99th_percentile() -> None:
    values = [[0.01 * (token + 1)] for token in range(100)]
    assert sampler_metrics(batch(values))["sampler/log_prob_diff/p99"] == pytest.approx(0.99)


def test_the_divergence_is_that_of_k3() -> None:
    found = sampler_metrics(batch([[0.5, -1.0]]))["sampler/kl"]
    assert found == pytest.approx(((math.exp(-0.5) - 1 + 0.5) + (math.exp(1.0) - 1 - 1.0)) / 2)


def test_equal_log_probs_diverge_by_nothing() -> None:
    assert set(sampler_metrics(batch([[0.0], [0.0, 0.0]])).values()) == {0.0}


def test_a_mean_at_the_threshold_is_no_disagreement() -> None:
    assert disagreement(batch([[0.25], [0.75]]), most=0.5) is None


def test_the_worst_rows_are_named_first_and_not_too_many() -> None:
    text = disagreement(batch([[0.1 * row] for row in range(10)]), most=0.2)
    assert text is not None
    assert "7 of 10 rows are above it, the worst: step 1 of goal/9: 0.9; step 1 of goal/8: 0.8; " in text
    assert text.count("goal/") == ROWS_NAMED


def test_a_row_without_loss_tokens_is_not_blamed() -> None:
    text = disagreement(batch([[9.0], [1.0]], masked={(0, 0)}), most=0.5)
    assert text is not None
    assert "goal/0" not in text
    assert "1 of 1 rows" in text


def test_a_row_that_was_copied_is_named_once() -> None:
    rows = batch([[1.0], [2.0]])
    text = disagreement(rows.take(torch.tensor([0, 1, 1])), most=0.5)
    assert text is not None
    assert text.count("goal/1") == 1


def played(*versions: int | None) -> list[Episode]:
    step = Step(
        page="",
        prompt_ids=[],
        response_ids=[],
        log_probs=[],
        text="",
        action="",
        parsed=True,
        admissible=True,
        valid=True,
    )
    steps = [replace(step, version=version) for version in versions]
    return [Episode(Task("goal", "train", "1"), "goal/1/0", steps)]


def test_responses_of_the_synced_weights_are_on_policy() -> None:
    require_version(played(3, 3), version=3)


@pytest.mark.parametrize("other", [2, None])
def test_a_response_of_other_weights_is_not_trained_on(other: int | None) -> None:
    with pytest.raises(InfrastructureError, match=rf"versions \[{other}\], and version 3 was synced"):
        require_version(played(3, other), version=3)
