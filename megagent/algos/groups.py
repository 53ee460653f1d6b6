"""Groups of rows: numbering them, and normalising a value within its group. Padding rows belong to none."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError, MegagentError

NORMS = ("mean_norm", "mean_std_norm")
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
    seen: dict[tuple[object, ...], int] = {}
    skipped = [False] * len(columns[0]) if skip is None else skip.tolist()
    try:
        numbers = [
            -1 if skipped_row else seen.setdefault(key, len(seen))
            for key, skipped_row in zip(zip(*columns, strict=True), skipped, strict=True)
        ]
    except TypeError as error:
        raise BatchError(f"rows are grouped by exact equality, so uid and anchor_obs must be text: {error}") from error
    return torch.tensor(numbers, dtype=torch.int64)


def normalise(values: Tensor, groups: Tensor, norm: str, lone: Literal["keeps", "zero"]) -> Tensor:
    """Each row's value against the other rows of its group.

    values: [rows]; groups: [rows] int64, -1 for none. norm: mean_norm subtracts the group's mean, mean_std_norm also
    divides by its sample standard deviation (n - 1) plus EPSILON. lone: what becomes of a row alone in its group, whose
    deviation is 1: it keeps its value (mean 0) or becomes zero (its own mean).
    Returns [rows], 0 for rows without a group, same dtype (statistics in float64).
    """
    if norm not in NORMS:
        raise MegagentError(f"algo.norm={norm} is unknown; use {' or '.join(NORMS)}")
    inside = groups >= 0
    member = groups[inside]
    value = values[inside].to(torch.float64)
    result = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if member.numel():
        size = torch.bincount(member)
        mean = torch.zeros(size.shape, dtype=torch.float64, device=values.device).index_add_(0, member, value) / size
        if lone == "keeps":
            mean = torch.where(size == 1, 0.0, mean)
        centred = value - mean[member]
        if norm == "mean_std_norm":
            squares = torch.zeros_like(mean).index_add_(0, member, centred.square())
            deviation = torch.where(size == 1, 1.0, (squares / (size - 1).clamp(min=1)).sqrt())
            centred = centred / (deviation[member] + EPSILON)
        result[inside] = centred
    return result.to(values.dtype)


def spread_over_loss_tokens(batch: StepBatch, per_row: Tensor) -> Jagged:
    """per_row: [rows]. Jagged float32 over the responses: the row's value where response_mask is 1, else 0."""
    mask: Jagged = batch["response_mask"]
    return mask.like(mask.spread(per_row.to(torch.float32)).values * mask.values.to(torch.float32))
