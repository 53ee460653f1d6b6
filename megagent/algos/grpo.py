"""Estimators that judge an episode by its whole reward, against the others of its task: grpo, dr_grpo and rloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagent.algos.groups import group_means, normalise, number, padding_rows, spread_over_loss_tokens, tasks
from megagent.batch import Jagged, StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def episodes(batch: StepBatch) -> Tensor:
    """[rows] int64: number of the row's episode, -1 for padding rows."""
    return number(batch["uid"], batch["traj_uid"], skip=padding_rows(batch))


def against_task(values: Tensor, batch: StepBatch, norm: str, baseline: str) -> Tensor:
    """[rows]: values [rows] against all of their task, by its rows or once for each episode (algo.baseline).

    A value alone in its task stays as it is. Padding rows get 0 and change no statistic.
    """
    counted = episodes(batch) if baseline == "trajectory" else None
    return normalise(values, tasks(batch), norm, lone="keeps", counted=counted)


def episode_advantages(batch: StepBatch, algo: AlgoConfig) -> Tensor:
    """[rows] float32: the row's score against its task.

    The score is the sum of the row's token_rewards: its episode's reward, less the row's own penalty. With
    algo.baseline=step, statistics run over all rows of the uid, so an episode counts once for each of its steps and
    long episodes own the baseline; with trajectory each counts once. A uid with one of them keeps its score.
    Source: GRPO (arXiv 2402.03300); per step row as verl-agent applies it.
    """
    return against_task(batch["token_rewards"].sums(), batch, algo.norm, algo.baseline)


def grpo_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """Jagged float32 over the responses: the episode advantage on every token that carries loss.

    Needs uid, token_rewards and response_mask, and traj_uid if algo.baseline=trajectory.
    """
    return spread_over_loss_tokens(batch, episode_advantages(batch, algo))


def dr_grpo_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """grpo without the two biases that Dr. GRPO names: never divided by a deviation, each episode counted once.

    The third, the length of a response, is the loss's: use algo.aggregation=seq-mean-token-sum with it.
    Needs uid, traj_uid, token_rewards and response_mask. Source: Dr. GRPO (arXiv 2503.20783).
    """
    scores = batch["token_rewards"].sums()
    return spread_over_loss_tokens(batch, against_task(scores, batch, "mean_norm", "trajectory"))


def rloo_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """The row's score less the mean of the other episodes of its task; its own rows are no part of the baseline.

    algo.baseline says whether the others count by their rows or once each. An episode alone in its task keeps its
    score. Needs uid, traj_uid, token_rewards and response_mask. Source: RLOO (arXiv 2402.14740).
    """
    scores = batch["token_rewards"].sums().to(torch.float64)
    episode, task = episodes(batch), tasks(batch)
    inside = episode >= 0
    advantages = torch.zeros_like(scores)
    if bool(inside.any()):
        own, task_of_row = episode[inside], task[inside]
        rows = torch.bincount(own).to(torch.float64)
        weight = rows if algo.baseline == "step" else torch.ones_like(rows)
        total = group_means(scores, episode) * weight
        task_of_episode = torch.empty(rows.shape, dtype=torch.int64).index_copy_(0, own, task_of_row)
        task_total = torch.zeros(int(task_of_row.max()) + 1, dtype=torch.float64)
        task_weight = task_total.clone().index_add_(0, task_of_episode, weight)
        task_total.index_add_(0, task_of_episode, total)
        others = task_weight[task_of_episode] - weight
        baseline = torch.where(others > 0, (task_total[task_of_episode] - total) / others.clamp(min=1), 0.0)
        advantages[inside] = scores[inside] - baseline[own]
    return spread_over_loss_tokens(batch, advantages)
