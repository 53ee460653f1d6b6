"""algo.compat=verl_agent against a reference written from the description of verl-agent's gigpo, one row at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from difflib import SequenceMatcher

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megagent.algos.advantages import ESTIMATORS
from megagent.algos.credit import credit
from megagent.batch import StepBatch, objects
from megagent.config import AlgoConfig


def reference(batch: StepBatch, algo: AlgoConfig) -> Tensor:
    """[rows, tokens] float32."""
    rows = len(batch)
    mask = batch["response_mask"].padded(0.0)
    returns = np.zeros(rows, dtype=np.float32)
    running: dict[str, float] = defaultdict(float)
    for i in reversed(range(rows)):
        running[batch["traj_uid"][i]] = float(batch["rewards"][i]) + algo.gamma * running[batch["traj_uid"][i]]
        returns[i] = running[batch["traj_uid"][i]]
    token_scores = torch.zeros(mask.shape)
    step_rewards = torch.from_numpy(returns)
    for i in range(rows):
        loss = torch.nonzero(mask[i]).reshape(-1)
        last = int(loss[-1]) if len(loss) else int(batch["responses"].lengths[i]) - 1
        token_scores[i, last] = batch["episode_rewards"][i]
        if not batch["is_action_valid"][i]:
            token_scores[i, last] -= algo.invalid_action_penalty
            step_rewards[i] -= algo.invalid_action_penalty
    groups: list[tuple[str, str]] = []
    representatives: dict[str, list[str]] = defaultdict(list)
    for uid, page in zip(batch["uid"], batch["anchor_obs"], strict=True):
        found = page
        if algo.step_groups == "similar":
            for text in representatives[uid]:
                if SequenceMatcher(None, page, text).ratio() >= algo.similarity:
                    found = text
                    break
            else:
                representatives[uid].append(page)
        groups.append((uid, found))
    episode = normalised(token_scores.sum(dim=-1), list(batch["uid"]), algo.norm, lone_mean_is_itself=False)
    step = normalised(step_rewards, groups, algo.norm, lone_mean_is_itself=True)
    return (episode + algo.step_weight * step).unsqueeze(-1) * mask


def normalised(scores: Tensor, keys: list, norm: str, lone_mean_is_itself: bool) -> Tensor:
    members: dict[object, list[Tensor]] = defaultdict(list)
    for score, key in zip(scores, keys, strict=True):
        members[key].append(score)
    out = scores.clone()
    for i, key in enumerate(keys):
        group = members[key]
        if len(group) == 1:
            mean, deviation = (group[0] if lone_mean_is_itself else torch.tensor(0.0)), torch.tensor(1.0)
        else:
            mean, deviation = torch.mean(torch.tensor(group)), torch.std(torch.tensor([group]))
        out[i] = scores[i] - mean if norm == "mean_norm" else (scores[i] - mean) / (deviation + 1e-6)
    return out


@pytest.mark.parametrize("norm", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("step_groups", ["exact", "similar"])
@given(seed=st.integers(0, 10**6), episodes=st.integers(1, 5), weight=st.floats(0, 2, width=16))
def test_the_reference_is_reproduced_to_the_last_digit(
    random_batch: Callable[..., StepBatch], norm: str, step_groups: str, seed: int, episodes: int, weight: float
) -> None:
    algo = AlgoConfig(compat="verl_agent", norm=norm, step_groups=step_groups, step_weight=weight)
    batch = random_batch(seed=seed, episodes=episodes)
    # Pages of 40 characters, the last of which differ from visit to visit: some are similar enough, some are not.
    rng = np.random.default_rng(seed)
    ends = rng.integers(1, 4, len(batch)).tolist()
    pages = (f"{page:-<{40 - n}}" + "x" * n for page, n in zip(batch["anchor_obs"], ends, strict=True))
    batch = batch.with_columns(anchor_obs=objects(pages))
    expected = reference(batch, algo)
    assert torch.equal(credit(batch, algo)["advantages"].padded(0.0), expected)


def test_the_noise_of_float32_statistics_is_part_of_it(scored_batch: Callable[..., StepBatch]) -> None:
    """Nine scores of 9.9: their float32 mean may be off by one unit, which an epsilon of 1e-6 does not hide."""
    batch = scored_batch([9.9] * 9, ["task"] * 9, anchors=[f"page {i}" for i in range(9)])
    algo = AlgoConfig(compat="verl_agent", norm="mean_std_norm")
    values = torch.full((9,), 9.9)
    expected = (values - values.mean()) / (values.std() + 1e-6)
    assert torch.equal(ESTIMATORS["gigpo"](batch, algo).values, expected)
    assert ESTIMATORS["gigpo"](batch, AlgoConfig(norm="mean_std_norm")).values.abs().max() < 1e-6
