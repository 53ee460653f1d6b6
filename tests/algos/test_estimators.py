"""Every estimator against a slow implementation that follows its definition, one row at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.adjust import align, real_rows
from megagent.algos.advantages import ESTIMATORS
from megagent.algos.credit import credit
from megagent.algos.gigpo import step_advantages, step_groups
from megagent.algos.grpo import episode_advantages
from megagent.batch import StepBatch, objects
from megagent.config import AlgoConfig
from megagent.errors import BatchError

FORMS = [
    AlgoConfig(estimator="gigpo", baseline="trajectory", norm="mean_std_norm"),
    AlgoConfig(estimator="gigpo", lone_step="raw"),
    AlgoConfig(estimator="gigpo", lone_step="task", penalty_propagates=True),
    AlgoConfig(estimator="grpo", baseline="trajectory"),
    AlgoConfig(estimator="grpo", norm="mean_std_norm"),
    AlgoConfig(estimator="dr_grpo"),
    AlgoConfig(estimator="rloo"),
    AlgoConfig(estimator="rloo", baseline="trajectory"),
    AlgoConfig(estimator="reinforce_pp", token_gamma=0.9),
    AlgoConfig(estimator="reinforce_pp_baseline"),
    AlgoConfig(estimator="reinforce_pp_baseline", baseline="trajectory"),
    AlgoConfig(estimator="remax"),
    AlgoConfig(estimator="step_returns", norm="mean_std_norm", penalty_propagates=True),
    AlgoConfig(estimator="gae"),
    AlgoConfig(estimator="gae", gae_over="tokens", token_gamma=0.9, gae_lambda=0.8),
]


def name(algo: AlgoConfig) -> str:
    plain = AlgoConfig()
    return " ".join(str(value) for key, value in vars(algo).items() if value != getattr(plain, key)) or "gigpo"


def with_values(batch: StepBatch, seed: int) -> StepBatch:
    """What gae and remax read besides."""
    generator = torch.Generator().manual_seed(seed)
    values = batch["response_mask"].like(torch.randn(batch["response_mask"].tokens, generator=generator))
    return batch.with_columns(values=values, baseline_rewards=torch.rand(len(batch), generator=generator))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(sum((x - mean(values)) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else 1.0


class Slow:
    """The definitions. Every list has one entry a row."""

    def __init__(self, batch: StepBatch, algo: AlgoConfig) -> None:
        self.batch, self.algo = batch, algo
        self.rows = range(len(batch))
        self.uid, self.traj = list(batch["uid"]), list(batch["traj_uid"])
        self.mask = [row.tolist() for row in batch["response_mask"].rows()]
        self.fines = [0.0 if valid else algo.invalid_action_penalty for valid in batch["is_action_valid"].tolist()]
        self.scores = [float(batch["episode_rewards"][i]) - self.fines[i] for i in self.rows]
        self.returns = [0.0] * len(batch)
        for i in self.rows:
            later = [j for j in self.rows if self.traj[j] == self.traj[i] and j >= i]
            charged = [self.fines[j] if algo.penalty_propagates else 0.0 for j in later]
            rewards = [float(batch["rewards"][j]) - fine for j, fine in zip(later, charged, strict=True)]
            self.returns[i] = sum(reward * algo.gamma**k for k, reward in enumerate(rewards))
            self.returns[i] -= 0.0 if algo.penalty_propagates else self.fines[i]

    def sample(self, values: list[float], i: int, baseline: str) -> list[float]:
        """What row i's task is summed up by: a value for each row, or one for each episode."""
        members = [j for j in self.rows if self.uid[j] == self.uid[i]]
        if baseline == "step":
            return [values[j] for j in members]
        episodes = dict.fromkeys(self.traj[j] for j in members)
        return [mean([values[j] for j in members if self.traj[j] == episode]) for episode in episodes]

    def against_task(self, values: list[float], norm: str, baseline: str) -> list[float]:
        out = []
        for i in self.rows:
            sample = self.sample(values, i, baseline)
            centred = values[i] - (mean(sample) if len(sample) > 1 else 0.0)
            out.append(centred / (deviation(sample) + 1e-6) if norm == "mean_std_norm" else centred)
        return out

    def spread(self, per_row: list[float]) -> list[list[float]]:
        return [[per_row[i] * m for m in self.mask[i]] for i in self.rows]

    def whiten(self, tokens: list[list[float]]) -> list[list[float]]:
        chosen = [tokens[i][t] for i in self.rows for t, m in enumerate(self.mask[i]) if m]
        if not chosen:
            return tokens
        scale = deviation(chosen) + 1e-6
        return [
            [(x - mean(chosen)) / scale if m else 0.0 for x, m in zip(tokens[i], self.mask[i], strict=True)]
            for i in self.rows
        ]

    def reward_place(self, i: int) -> int:
        """The token that holds the row's score: the last with loss, or the last."""
        loss = [t for t, m in enumerate(self.mask[i]) if m]
        return loss[-1] if loss else len(self.mask[i]) - 1

    def gigpo(self) -> list[list[float]]:
        pages = list(zip(self.uid, self.batch["anchor_obs"], strict=True))
        episode = self.against_task(self.scores, self.algo.norm, self.algo.baseline)
        step = []
        for i in self.rows:
            group = [self.returns[j] for j in self.rows if pages[j] == pages[i]]
            centred = self.returns[i] - mean(group)
            value = centred / (deviation(group) + 1e-6) if self.algo.norm == "mean_std_norm" else centred
            if len(group) == 1 and self.algo.lone_step == "raw":
                value = self.returns[i]
            if len(group) == 1 and self.algo.lone_step == "task":
                value = self.returns[i] - mean(self.sample(self.returns, i, "step"))
            step.append(value)
        return self.spread([e + self.algo.step_weight * s for e, s in zip(episode, step, strict=True)])

    def grpo(self) -> list[list[float]]:
        return self.spread(self.against_task(self.scores, self.algo.norm, self.algo.baseline))

    def dr_grpo(self) -> list[list[float]]:
        return self.spread(self.against_task(self.scores, "mean_norm", "trajectory"))

    def rloo(self) -> list[list[float]]:
        out = []
        for i in self.rows:
            others: dict[str, list[float]] = defaultdict(list)
            for j in self.rows:
                if self.uid[j] == self.uid[i] and self.traj[j] != self.traj[i]:
                    others[self.traj[j]].append(self.scores[j])
            sample = [x for xs in others.values() for x in xs]
            if self.algo.baseline == "trajectory":
                sample = [mean(xs) for xs in others.values()]
            out.append(self.scores[i] - (mean(sample) if sample else 0.0))
        return self.spread(out)

    def reinforce_pp(self) -> list[list[float]]:
        tokens = []
        for i in self.rows:
            loss = [t for t, m in enumerate(self.mask[i]) if m]
            row = [0.0] * len(self.mask[i])
            for back, t in enumerate(reversed(loss)):
                row[t] = self.scores[i] * self.algo.token_gamma**back
            tokens.append(row)
        return self.whiten(tokens)

    def reinforce_pp_baseline(self) -> list[list[float]]:
        return self.whiten(self.spread(self.against_task(self.scores, "mean_norm", self.algo.baseline)))

    def remax(self) -> list[list[float]]:
        return self.spread([self.scores[i] - float(self.batch["baseline_rewards"][i]) for i in self.rows])

    def step_returns(self) -> list[list[float]]:
        return self.spread(self.against_task(self.returns, self.algo.norm, self.algo.baseline))

    def gae(self) -> list[list[float]]:
        values = [row.tolist() for row in self.batch["values"].rows()]
        if self.algo.gae_over == "tokens":
            tokens = []
            for i in self.rows:
                row, after, next_value = [0.0] * len(self.mask[i]), 0.0, 0.0
                for t in reversed([t for t, m in enumerate(self.mask[i]) if m]):
                    reward = self.scores[i] if t == self.reward_place(i) else 0.0
                    delta = reward + self.algo.token_gamma * next_value - values[i][t]
                    row[t] = after = delta + self.algo.token_gamma * self.algo.gae_lambda * after
                    next_value = values[i][t]
                tokens.append(row)
            return self.whiten(tokens)
        out = [0.0] * len(self.batch)
        after: dict[str, tuple[float, float]] = {}
        for i in reversed(self.rows):
            next_value, next_advantage = after.get(self.traj[i], (0.0, 0.0))
            reward = float(self.batch["rewards"][i]) - self.fines[i]
            delta = reward + self.algo.gamma * next_value - values[i][0]
            out[i] = delta + self.algo.gamma * self.algo.gae_lambda * next_advantage
            after[self.traj[i]] = (values[i][0], out[i])
        return self.whiten(self.spread(out))


@pytest.mark.parametrize("algo", FORMS, ids=name)
@given(seed=st.integers(0, 10**6), episodes=st.integers(1, 3), max_steps=st.integers(1, 4))
def test_an_estimator_equals_its_definition(
    random_batch: Callable[..., StepBatch], algo: AlgoConfig, seed: int, episodes: int, max_steps: int
) -> None:
    batch = with_values(random_batch(seed=seed, tasks=2, episodes=episodes, max_steps=max_steps), seed)
    tokens = [token for row in getattr(Slow(batch, algo), algo.estimator)() for token in row]
    # Where all of a group is equal but for rounding, float32 inputs leave 1e-6 over an epsilon of 1e-6.
    torch.testing.assert_close(
        credit(batch, algo)["advantages"].values, torch.tensor(tokens, dtype=torch.float32), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("algo", FORMS, ids=name)
@given(seed=st.integers(0, 10**6), multiple=st.integers(2, 50))
def test_padding_changes_no_advantage_of_any_estimator(
    random_batch: Callable[..., StepBatch], algo: AlgoConfig, seed: int, multiple: int
) -> None:
    batch = with_values(random_batch(seed=seed, tasks=2, episodes=2), seed)
    credited = credit(align(batch, multiple), algo)
    assert torch.equal(real_rows(credited)["advantages"].values, credit(batch, algo)["advantages"].values)
    assert not credited.take(credited["is_padding"])["advantages"].values.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_rows_get_no_advantages(random_batch: Callable[..., StepBatch], estimator: str) -> None:
    batch = with_values(random_batch(), 0).take([])
    assert credit(batch, AlgoConfig(estimator=estimator))["advantages"].tokens == 0


# By hand.


def test_each_episode_may_count_once_whatever_its_length(scored_batch: Callable[..., StepBatch]) -> None:
    """A success of 4 steps against a failure of 2: by rows the baseline is 40 / 6 = 6.67, by trajectories it is 5."""
    batch = scored_batch([10.0] * 4 + [0.0] * 2, ["task"] * 6)
    batch = batch.with_columns(traj_uid=objects(["won"] * 4 + ["lost"] * 2))
    by_rows = episode_advantages(batch, AlgoConfig(baseline="step"))
    torch.testing.assert_close(by_rows, torch.tensor([10 - 40 / 6] * 4 + [-40 / 6] * 2))
    by_episodes = episode_advantages(batch, AlgoConfig(baseline="trajectory"))
    assert by_episodes.tolist() == [5.0] * 4 + [-5.0] * 2


def test_a_leave_one_out_baseline_leaves_the_whole_episode_out(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0, 10.0, 4.0, 1.0], ["task"] * 4)
    batch = batch.with_columns(traj_uid=objects(["a", "a", "b", "c"]))
    advantages = ESTIMATORS["rloo"](batch, AlgoConfig(baseline="trajectory")).values
    assert advantages.tolist() == [10 - 2.5, 10 - 2.5, 4 - 5.5, 1 - 7.0]


@pytest.mark.parametrize(("policy", "expected"), [("zero", 0.0), ("raw", 9.0), ("task", 9.0 - 14 / 3)])
def test_a_step_alone_in_its_group_gets_what_the_policy_says(
    scored_batch: Callable[..., StepBatch], policy: str, expected: float
) -> None:
    batch = scored_batch([0.0] * 3, ["task"] * 3, anchors=["home", "home", "item"], returns=[1.0, 4.0, 9.0])
    steps = step_advantages(batch, AlgoConfig(lone_step=policy))
    torch.testing.assert_close(steps, torch.tensor([-1.5, 1.5, expected]))


def test_similar_pages_join_the_first_representative_that_they_resemble(scored_batch: Callable[..., StepBatch]) -> None:
    """Twenty characters, one changed: 2 x 19 / 40 = 0.95. Two changed from the first: a group of its own."""
    pages = ["a" * 20, "a" * 19 + "b", "a" * 18 + "bb", "a" * 19 + "b", "a" * 20]
    batch = scored_batch([0.0] * 5, ["one"] * 4 + ["two"], anchors=pages)
    assert step_groups(batch, AlgoConfig(step_groups="similar", similarity=0.95)).tolist() == [0, 0, 1, 0, 2]
    assert step_groups(batch, AlgoConfig(step_groups="similar", similarity=0.9)).tolist() == [0, 0, 0, 0, 1]
    assert step_groups(batch, AlgoConfig()).tolist() == [0, 1, 2, 1, 3]


def test_similar_pages_must_be_text(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([1.0], ["task"]).with_columns(anchor_obs=objects([("a", "tuple")]))
    with pytest.raises(BatchError, match="anchor_obs must be text, not"):
        step_groups(batch, AlgoConfig(step_groups="similar"))


def test_a_value_target_is_the_return_where_lambda_is_one(random_batch: Callable[..., StepBatch]) -> None:
    algo = AlgoConfig(estimator="gae", gae_lambda=1.0, penalty_propagates=True)
    batch = credit(with_values(random_batch(), 0), algo)
    mask = batch["response_mask"]
    torch.testing.assert_close(batch["value_targets"].values, mask.spread(batch["returns"]).values * mask.values)
