"""GiGPO: the episode advantage of GRPO plus the advantage of a step among steps taken from the same state.

Two episodes of a task often pass the same page. There they chose different actions with different returns, so the page
is a group of its own: it tells which action was better from right here, not only which episode went better overall.
Source: GiGPO (arXiv 2505.10978) and its implementation in verl-agent.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagent.algos.compat import verl_agent_normalise
from megagent.algos.groups import group_means, normalise, number, padding_rows, spread_over_loss_tokens, tasks
from megagent.algos.grpo import episode_advantages
from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def step_groups(batch: StepBatch, algo: AlgoConfig | None = None) -> Tensor:
    """[rows] int64: number of the row's step group, -1 for padding rows.

    A step group is all rows of a task (uid) whose anchor_obs, the observation without history, is exactly equal; with
    algo.step_groups=similar, all rows that joined the same representative (see similar_step_groups).
    Raises BatchError for an anchor that cannot be compared.
    """
    if algo is not None and algo.step_groups == "similar":
        return similar_step_groups(batch, algo.similarity)
    return number(batch["uid"], batch["anchor_obs"], skip=padding_rows(batch))


def similar_step_groups(batch: StepBatch, threshold: float) -> Tensor:
    """[rows] int64: as step_groups, pages being one where difflib finds `threshold` of their characters alike.

    A row joins the first representative of its task that it resembles, or becomes the next one: the order of the rows
    matters, and a group's members need not resemble each other.
    Source: verl-agent's build_step_group; the ratio is SequenceMatcher(None, page, representative), on characters.
    """
    representatives: dict[object, list[tuple[SequenceMatcher[str], int]]] = {}
    known: dict[tuple[object, str], int] = {}  # a page seen before joins the same one: those found later come after
    groups: list[int] = []
    count = 0
    for uid, page, skipped in zip(batch["uid"], batch["anchor_obs"], padding_rows(batch).tolist(), strict=True):
        if skipped:
            groups.append(-1)
            continue
        if not isinstance(page, str):
            raise BatchError(
                f"similar pages are compared by their characters, so anchor_obs must be text, not {page!r}"
            )
        group = known.get((uid, page))
        if group is None:
            of_task = representatives.setdefault(uid, [])
            group = next((each for matcher, each in of_task if _resembles(page, matcher, threshold)), None)
            if group is None:
                group, count = count, count + 1
                of_task.append((SequenceMatcher(None, "", page), group))
            known[uid, page] = group
        groups.append(group)
    return torch.tensor(groups, dtype=torch.int64)


def _resembles(page: str, matcher: SequenceMatcher[str], threshold: float) -> bool:
    # The matcher has indexed its second text, the representative, once for all pages.
    matcher.set_seq1(page)
    # The two quick ratios are upper bounds of the slow one.
    return all(ratio() >= threshold for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio))


def step_advantages(batch: StepBatch, algo: AlgoConfig) -> Tensor:
    """[rows] float32: the step's discounted return against its step group.

    A step alone in its group has nothing to be compared with; algo.lone_step says what it gets: zero (as the
    reference), raw (its return) or task (its return less the mean return of its task's steps).
    """
    groups = step_groups(batch, algo)
    returns = batch["returns"]
    advantages = normalise(returns, groups, algo.norm, lone="zero")
    if algo.lone_step == "zero" or not bool((groups >= 0).any()):
        return advantages
    alone = (groups >= 0) & (torch.bincount(groups[groups >= 0])[groups.clamp(min=0)] == 1)
    value = returns
    if algo.lone_step == "task":
        task = tasks(batch)
        value = returns - group_means(returns, task)[task.clamp(min=0)].to(returns.dtype)
    return torch.where(alone, value, advantages)


def gigpo_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """Jagged float32 over the responses: episode + algo.step_weight * step on every token that carries loss.

    Needs uid, anchor_obs, returns, token_rewards and response_mask, and traj_uid if algo.baseline=trajectory. Padding
    rows get 0 and change no statistic.
    """
    if algo.compat == "verl_agent":
        scores = batch["token_rewards"].padded(0.0).sum(dim=-1)
        episode = verl_agent_normalise(scores, tasks(batch), algo.norm, lone="keeps")
        step = verl_agent_normalise(batch["returns"], step_groups(batch, algo), algo.norm, lone="zero")
    else:
        episode, step = episode_advantages(batch, algo), step_advantages(batch, algo)
    return spread_over_loss_tokens(batch, episode + algo.step_weight * step)
