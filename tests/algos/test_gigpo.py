"""GiGPO and GRPO against numbers worked out by hand, and against a slow implementation that follows the definition."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.adjust import align, real_rows
from megagent.algos.advantages import ESTIMATORS, estimate_advantages
from megagent.algos.credit import credit, penalise, step_returns
from megagent.algos.gigpo import step_advantages, step_groups
from megagent.algos.grpo import episode_advantages
from megagent.algos.rewards import place_episode_reward
from megagent.batch import StepBatch, objects
from megagent.config import AlgoConfig
from megagent.errors import BatchError, MegagentError

MEAN = AlgoConfig(norm="mean_norm")
MEAN_STD = AlgoConfig(norm="mean_std_norm")


# By hand.


def test_eight_episodes_with_one_success(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0] + [0.0] * 7, ["task"] * 8)
    torch.testing.assert_close(episode_advantages(batch, MEAN), torch.tensor([8.75] + [-1.25] * 7))


def test_a_standard_deviation_divides_by_n_minus_one(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0] + [0.0] * 7, ["task"] * 8)
    deviation = math.sqrt((8.75**2 + 7 * 1.25**2) / 7)  # 3.5355
    torch.testing.assert_close(episode_advantages(batch, MEAN_STD)[0], torch.tensor(8.75 / deviation))


def test_an_episode_counts_once_for_each_of_its_steps(scored_batch: Callable[..., StepBatch]) -> None:
    """A success of 4 steps against a failure of 2: the baseline is 40 / 6, where two equal episodes would make it 5."""
    batch = scored_batch([10.0] * 4 + [0.0] * 2, ["task"] * 6)
    torch.testing.assert_close(episode_advantages(batch, MEAN)[0], torch.tensor(10.0 - 40.0 / 6.0))


def test_a_copied_row_moves_the_mean_and_padding_does_not(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0, 0.0], ["task", "task"])
    copied = episode_advantages(batch.take([0, 1, 0]), MEAN)
    torch.testing.assert_close(copied[:2], torch.tensor([10.0, 0.0]) - 20.0 / 3.0)  # mean 6.67

    aligned = align(batch, 3)
    advantages = episode_advantages(aligned, MEAN)
    assert advantages[~aligned["is_padding"]].tolist() == [5.0, -5.0]  # mean 5, as without padding
    assert advantages[aligned["is_padding"]].tolist() == [0.0]


def test_a_task_with_one_row_keeps_its_score(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0], ["task"])
    assert episode_advantages(batch, MEAN).tolist() == [10.0]
    torch.testing.assert_close(episode_advantages(batch, MEAN_STD), torch.tensor([10.0]), rtol=1e-5, atol=0.0)


def test_steps_are_compared_where_task_and_page_are_the_same(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch(
        [0.0] * 4, ["one", "one", "one", "two"], anchors=["home", "home", "item", "home"], returns=[10.0, 8.0, 5.0, 3.0]
    )
    assert step_groups(batch).tolist() == [0, 0, 1, 2]
    assert step_advantages(batch, MEAN).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_the_joint_advantage_lies_on_loss_tokens_only(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0, 0.0], ["task", "task"], returns=[9.0, 1.0])
    batch = batch.with_columns(response_mask=batch["response_mask"].like(torch.tensor([1.0, 0.0])))
    joint = ESTIMATORS["gigpo"](batch, AlgoConfig(step_weight=0.5))
    assert joint.values.tolist() == [5.0 + 0.5 * 4.0, 0.0]


def test_equal_rewards_give_no_advantage(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([0.1] * 5, ["task"] * 5)
    assert episode_advantages(batch, MEAN_STD).abs().max() < 1e-6


# By definition, one row at a time.


def golden_normalise(values: list[float], keys: list[Hashable], norm: str, lone_mean: str) -> list[float]:
    members: dict[Hashable, list[float]] = defaultdict(list)
    for value, key in zip(values, keys, strict=True):
        members[key].append(value)
    out = []
    for value, key in zip(values, keys, strict=True):
        group = members[key]
        if len(group) == 1:
            mean, deviation = (0.0 if lone_mean == "zero" else group[0]), 1.0
        else:
            mean = sum(group) / len(group)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
        out.append(value - mean if norm == "mean_norm" else (value - mean) / (deviation + 1e-6))
    return out


def golden_credit(batch: StepBatch, algo: AlgoConfig) -> list[list[float]]:
    """The whole of credit(): returns, reward on the last token, penalty, joint advantage over the mask."""
    rows = range(len(batch))
    returns, running = [0.0] * len(batch), {}
    for i in reversed(rows):
        traj = batch["traj_uid"][i]
        running[traj] = returns[i] = float(batch["rewards"][i]) + algo.gamma * running.get(traj, 0.0)
    scores = [float(batch["episode_rewards"][i]) for i in rows]
    for i in rows:
        if not batch["is_action_valid"][i]:
            returns[i] -= algo.invalid_action_penalty
            scores[i] -= algo.invalid_action_penalty
    uids = [batch["uid"][i] for i in rows]
    pages: list[Hashable] = [(batch["uid"][i], batch["anchor_obs"][i]) for i in rows]
    joint = golden_normalise(scores, list(uids), algo.norm, lone_mean="zero")
    if algo.estimator == "gigpo":
        step = golden_normalise(returns, pages, algo.norm, lone_mean="itself")
        joint = [e + algo.step_weight * s for e, s in zip(joint, step, strict=True)]
    return [[joint[i] * m for m in batch["response_mask"].row(i).tolist()] for i in rows]


@pytest.mark.parametrize("norm", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("estimator", ["gigpo", "grpo"])
@given(seed=st.integers(0, 10**6), episodes=st.integers(1, 4), max_steps=st.integers(1, 5), weight=st.floats(0, 2))
def test_credit_equals_the_definition(
    random_batch: Callable[..., StepBatch],
    estimator: str,
    norm: str,
    seed: int,
    episodes: int,
    max_steps: int,
    weight: float,
) -> None:
    algo = AlgoConfig(estimator=estimator, norm=norm, step_weight=weight)
    batch = random_batch(seed=seed, episodes=episodes, max_steps=max_steps)
    expected = torch.tensor([token for row in golden_credit(batch, algo) for token in row])
    # Where all of a group is equal but for rounding, float32 inputs leave 1e-6 over an epsilon of 1e-6.
    torch.testing.assert_close(credit(batch, algo)["advantages"].values, expected, rtol=1e-5, atol=1e-4)


# Padding.


@given(seed=st.integers(0, 10**6), multiple=st.integers(1, 50), norm=st.sampled_from(["mean_norm", "mean_std_norm"]))
def test_padding_rows_change_no_advantage(
    random_batch: Callable[..., StepBatch], seed: int, multiple: int, norm: str
) -> None:
    algo = AlgoConfig(norm=norm)
    batch = random_batch(seed=seed)
    credited = credit(align(batch, multiple), algo)
    assert torch.equal(real_rows(credited)["advantages"].values, credit(batch, algo)["advantages"].values)
    padding = credited.take(credited["is_padding"])
    assert not padding["advantages"].values.any()


def test_the_pipeline_may_align_after_the_returns(random_batch: Callable[..., StepBatch]) -> None:
    algo = AlgoConfig()
    batch = align(step_returns(random_batch(), algo), 64)
    batch = estimate_advantages(penalise(place_episode_reward(batch), algo), algo)
    expected = credit(random_batch(), algo)["advantages"].values
    assert torch.equal(real_rows(batch)["advantages"].values, expected)


def test_padding_rows_with_a_real_uid_would_change_nothing_either(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0, 0.0, 99.0], ["task"] * 3, returns=[1.0, 3.0, 99.0])
    batch = batch.with_columns(is_padding=torch.tensor([False, False, True]))
    assert ESTIMATORS["gigpo"](batch, MEAN).values[:2].tolist() == [5.0 - 1.0, -5.0 + 1.0]


def test_a_batch_of_no_rows_gets_no_advantages(random_batch: Callable[..., StepBatch]) -> None:
    assert credit(random_batch().take([]), AlgoConfig())["advantages"].tokens == 0


# Bad input.


def test_an_unknown_estimator_is_named_with_the_known_ones(scored_batch: Callable[..., StepBatch]) -> None:
    with pytest.raises(MegagentError, match=r"algo.estimator=gipgo is unknown; use one of gigpo, grpo"):
        estimate_advantages(scored_batch([1.0], ["task"]), AlgoConfig(estimator="gipgo"))


def test_an_unknown_norm_is_named_with_the_known_ones(scored_batch: Callable[..., StepBatch]) -> None:
    with pytest.raises(MegagentError, match=r"algo.norm=std is unknown; use mean_norm or mean_std_norm"):
        episode_advantages(scored_batch([1.0], ["task"]), AlgoConfig(norm="std"))


def test_an_anchor_that_cannot_be_compared_is_refused(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([1.0], ["task"]).with_columns(anchor_obs=objects([["a", "list"]]))
    with pytest.raises(BatchError, match="anchor_obs must be text"):
        step_groups(batch)
