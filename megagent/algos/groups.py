"""Groups of rows: numbering them, and normalising a value within its group. Padding rows belong to none."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megagent.algos.choices import NORMS
from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError, MegagentError

EPSILON = 1e-6  # added to a standard deviation before dividing by it, as verl and verl-agent do


def padding_rows(batch: StepBatch) -> Tensor:
    """[rows] bool: true for the rows that only fill up the schedule. All false where nothing was padded yet."""
    if "is_padding" in batch:
        return batch["is_padding"]
    return torch.zeros(len(batch), dtype=torch.bool)


def number(*columns: np.ndarray, skip: Tensor | None = None) -> Tensor:
    """[rows] int64 group number of each row, from 0 in order of appearance: rows with equal columns share one.

    columns: [rows] objects, hashable. skip: [rows] bool, rows that belong to no group and get -1.
    Raises BatchError for a value that cannot be hashed.
    """
    seen: dict[object, int] = {}
    keys = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    skipped = [False] * len(columns[0]) if skip is None else skip.tolist()
    try:
        numbers = [
            -1 if skipped_row else seen.setdefault(key, len(seen))
            for key, skipped_row in zip(keys, skipped, strict=True)
        ]
    except TypeError as error:
        raise BatchError(f"rows are grouped by exact equality, so uid and anchor_obs must be text: {error}") from error
    return torch.tensor(numbers, dtype=torch.int64)


def tasks(batch: StepBatch) -> Tensor:
    """[rows] int64: number of the row's task, -1 for padding rows."""
    return number(batch["uid"], skip=padding_rows(batch))


def group_means(values: Tensor, groups: Tensor) -> Tensor:
    """[groups] float64: mean of the values of each group. groups: [rows] int64 from 0, without gaps; -1 for none."""
    inside = groups >= 0
    member = groups[inside]
    size = torch.bincount(member)
    total = torch.zeros(size.shape, dtype=torch.float64, device=values.device)
    return total.index_add_(0, member, values[inside].to(torch.float64)) / size


def normalise(
    values: Tensor,
    groups: Tensor,
    norm: str,
    lone: Literal["keeps", "zero"],
    counted: Tensor | None = None,
) -> Tensor:
    """Each row's value against its group.

    values: [rows]; groups: [rows] int64, -1 for none. norm: mean_norm subtracts the group's mean, mean_std_norm also
    divides by its sample standard deviation (n - 1) plus EPSILON. lone: what becomes of a value alone in its group,
    whose deviation is 1: it keeps its value (mean 0) or becomes zero (its own mean). counted: [rows] int64 number of
    the row's episode, -1 for none: each then counts once, by the mean of its rows; each row by default.
    Returns [rows], 0 for rows without a group, same dtype (statistics in float64).
    """
    if norm not in NORMS:
        raise MegagentError(f"algo.norm={norm} is unknown; use {' or '.join(NORMS)}")
    inside = groups >= 0
    member = groups[inside]
    value = values[inside].to(torch.float64)
    result = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if member.numel():
        sample, sampled = value, member
        if counted is not None:
            sample = group_means(values, counted)
            sampled = torch.empty(sample.shape, dtype=torch.int64, device=values.device)
            sampled[counted[inside]] = member
        size = torch.bincount(sampled)
        mean = group_means(sample, sampled)
        if lone == "keeps":
            mean = torch.where(size == 1, 0.0, mean)
        centred = value - mean[member]
        if norm == "mean_std_norm":
            squares = torch.zeros_like(mean).index_add_(0, sampled, (sample - mean[sampled]).square())
            deviation = torch.where(size == 1, 1.0, (squares / (size - 1).clamp(min=1)).sqrt())
            centred = centred / (deviation[member] + EPSILON)
        result[inside] = centred
    return result.to(values.dtype)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values less their mean, over their deviation plus EPSILON, both over all places where mask is not 0.

    values, mask: one shape. The deviation is the sample one (n - 1), and 1 for fewer than two places. Returns the same
    shape and dtype, 0 where mask is 0 (statistics in float64). Source: verl's masked_whiten.
    """
    keep = mask != 0
    chosen = values[keep].to(torch.float64)
    result = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if chosen.numel():
        deviation = chosen.std() if chosen.numel() > 1 else torch.ones((), dtype=torch.float64)
        result[keep] = (chosen - chosen.mean()) / (deviation + EPSILON)
    return result.to(values.dtype)


def spread_over_loss_tokens(batch: StepBatch, per_row: Tensor) -> Jagged:
    """per_row: [rows]. Jagged float32 over the responses: the row's value where response_mask is 1, else 0."""
    mask: Jagged = batch["response_mask"]
    return mask.like(mask.spread(per_row.to(torch.float32)).values * (mask.values != 0))
