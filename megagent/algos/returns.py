"""Sums along the steps of an episode, or along any other chain of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from megagent.errors import BatchError


def discounted_returns(rewards: Tensor, traj: Tensor, gamma: float, step_index: Tensor | None = None) -> Tensor:
    """Return-to-go of every step within its episode: G_t = r_t + gamma * G_{t+1}.

    rewards: [rows] reward of each step; traj: [rows] episode number of each row. The rows of an episode are in time
    order, but other episodes' rows may lie between them. step_index: [rows] place of the step in its episode; if given,
    the order is checked. Returns [rows], same dtype (summed in float64).
    Raises BatchError if an episode's rows are not in time order or the lengths differ.
    Source: GiGPO, section 4.2 (arXiv 2505.10978); verl-agent computes them per traj_uid in row order.
    """
    rows = rewards.numel()
    if traj.numel() != rows or (step_index is not None and step_index.numel() != rows):
        raise BatchError(f"{rows} rewards need as many episode numbers and step indices, one for each row")
    if rows == 0:
        return rewards.clone()
    order = torch.argsort(traj, stable=True)  # episodes one after the other, rows of each as they came
    episode = traj[order]
    last = torch.ones(rows, dtype=torch.bool, device=rewards.device)
    last[:-1] = episode[1:] != episode[:-1]
    if step_index is not None:
        _check_time_order(step_index[order], last, order)

    ends = torch.nonzero(last).reshape(-1)
    steps = torch.diff(ends, prepend=ends.new_tensor([-1]))  # [episodes]
    values = rewards[order].to(torch.float64)
    # One pass per step, counted from the end, over all episodes that have it: as many passes as the longest has steps.
    for back in range(1, int(steps.max())):
        at = ends[steps > back] - back
        values[at] += gamma * values[at + 1]
    returns = torch.empty_like(values)
    returns[order] = values
    return returns.to(rewards.dtype)


def following(values: Tensor, traj: Tensor) -> Tensor:
    """[rows]: the value of the next row of the same episode, 0 after its last. values, traj: as discounted_returns."""
    result = torch.zeros_like(values)
    order = torch.argsort(traj, stable=True)
    goes_on = traj[order][1:] == traj[order][:-1]
    result[order[:-1][goes_on]] = values[order[1:][goes_on]]
    return result


def _check_time_order(step: Tensor, last: Tensor, order: Tensor) -> None:
    wrong = (step[1:] <= step[:-1]) & ~last[:-1]
    if bool(wrong.any()):
        place = int(torch.nonzero(wrong)[0])
        raise BatchError(
            f"rows of an episode are not in time order: row {int(order[place])} is step {int(step[place])} and row "
            f"{int(order[place + 1])} after it is step {int(step[place + 1])}; sort each episode's rows by step_index"
        )
