"""What another implementation computes, to its last digit (algo.compat)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megagent.algos.groups import EPSILON


def verl_agent_normalise(values: Tensor, groups: Tensor, norm: str, lone: Literal["keeps", "zero"]) -> Tensor:
    """As groups.normalise, with float32 statistics in the order of the rows, as verl-agent's gigpo has them.

    It shows where all of a group is equal: a float32 mean of equal numbers can be off by a unit in the last place, the
    deviation is then as small as the EPSILON added to it, and the advantage is not 0 but anything up to about 1.
    values: [rows]; groups: [rows] int64, -1 for none. Returns [rows] float32. One small kernel a group: slow.
    Source: verl-agent's episode_norm_reward and step_norm_reward.
    """
    values = values.to(torch.float32)
    result = torch.zeros_like(values)
    order = torch.argsort(groups, stable=True)
    order = order[groups[order] >= 0]
    if order.numel() == 0:
        return result
    _, sizes = torch.unique_consecutive(groups[order], return_counts=True)
    for rows in torch.split(order, sizes.tolist()):
        group = values[rows]
        if rows.numel() > 1:
            mean, deviation = group.mean(), group.std()
        else:
            mean = group[0] if lone == "zero" else torch.zeros(())
            deviation = torch.ones(())
        result[rows] = group - mean if norm == "mean_norm" else (group - mean) / (deviation + EPSILON)
    return result
