"""The numbers of docs/algorithms.md, in its order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megagent.algos.adjust import align
from megagent.algos.advantages import ESTIMATORS
from megagent.algos.gigpo import step_advantages
from megagent.algos.grpo import episode_advantages
from megagent.algos.returns import discounted_returns
from megagent.batch import StepBatch, objects
from megagent.config import AlgoConfig


@pytest.fixture
def eight(scored_batch: Callable[..., StepBatch]) -> StepBatch:
    """Eight episodes of four steps, the first of which wins; its second page is seen by the second episode too."""
    episode = torch.arange(32) // 4
    rewards = torch.zeros(32)
    rewards[3] = 10.0
    pages = [f"page {n}" for n in range(32)]
    pages[5] = pages[1]
    batch = scored_batch(
        [10.0] * 4 + [0.0] * 28,
        ["task"] * 32,
        anchors=pages,
        returns=discounted_returns(rewards, episode, 0.95).tolist(),
    )
    return batch.with_columns(traj_uid=objects(f"episode {n}" for n in episode.tolist()))


def test_the_discounted_returns(eight: StepBatch) -> None:
    torch.testing.assert_close(eight["returns"][:4], torch.tensor([8.57375, 9.025, 9.5, 10.0]))
    assert not eight["returns"][4:].any()


def test_the_episode_advantages(eight: StepBatch) -> None:
    torch.testing.assert_close(episode_advantages(eight, AlgoConfig()), torch.tensor([8.75] * 4 + [-1.25] * 28))
    normalised = episode_advantages(eight, AlgoConfig(norm="mean_std_norm"))
    assert float(normalised[0]) == pytest.approx(8.75 / 3.36, abs=1e-3) == pytest.approx(2.60, abs=5e-3)


def test_the_step_advantages(eight: StepBatch) -> None:
    steps = step_advantages(eight, AlgoConfig())
    assert steps[[1, 5]].tolist() == pytest.approx([4.5125, -4.5125])
    steps[[1, 5]] = 0.0
    assert not steps.any()


def test_the_joint_advantage(eight: StepBatch) -> None:
    assert float(ESTIMATORS["gigpo"](eight, AlgoConfig()).values[1]) == pytest.approx(13.2625)


def test_four_steps_against_two(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0] * 4 + [0.0] * 2, ["task"] * 6)
    batch = batch.with_columns(traj_uid=objects(["won"] * 4 + ["lost"] * 2))
    assert 10.0 - float(episode_advantages(batch, AlgoConfig())[0]) == pytest.approx(6.67, abs=5e-3)
    assert 10.0 - float(episode_advantages(batch, AlgoConfig(baseline="trajectory"))[0]) == 5.0


def test_a_copied_row_against_a_padding_row(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0, 0.0], ["task", "task"])
    means = {}
    for mode, seed in (("copy", 0), ("copy", 1), ("copy", 2), ("copy", 3), ("pad", 0)):
        aligned = align(batch, 3, mode, seed)
        real = aligned["token_rewards"].sums() == 10.0
        means[mode, aligned["token_rewards"].sums().tolist().count(10.0)] = 10.0 - float(
            episode_advantages(aligned, AlgoConfig())[real][0]
        )
    assert means["copy", 2] == pytest.approx(6.67, abs=5e-3)
    assert means["pad", 1] == 5.0
