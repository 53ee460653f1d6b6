"""Batch adjustment: the number of rows that the Megatron schedule needs, without changing what is learnt.

Every data-parallel rank must run the same number of whole micro-batches, or its peers wait for it forever. The rows of
an iteration are as many as the episodes had steps, so rows are added. The reference copies real ones, which moves the
group means: the rewards [10, 0] with the first row copied have mean 6.67 instead of 5. Here added rows weigh nothing,
unless algo.adjust asks for the reference's ways.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megagent.algos.choices import ADJUSTMENTS
from megagent.algos.groups import padding_rows
from megagent.batch import Column, Jagged, StepBatch, objects
from megagent.errors import BatchError


def align(batch: StepBatch, multiple: int, mode: str = "pad", seed: int = 0) -> StepBatch:
    """The batch brought to a multiple of `multiple` rows, with is_padding marking the rows that weigh nothing.

    mode is algo.adjust:
      pad     adds padding rows up to the next multiple. Each has one prompt and one response token (copied from row 0,
              so they are legal ids), response_mask 0, a valid action, a uid and traj_uid of its own and 0 or None in
              every other column. Real rows keep their order and values. Padding is spread evenly among them: at the end
              it would make the last rank and the last mini-batches idle, and an optimizer step of a few rows is as long
              as one of many.
      copy    adds rows drawn at random, as they are, at the end: they count twice, in group means and in the loss.
      delete  takes rows drawn at random away, down to a multiple. Fewer rows than one multiple are padded instead.
    copy and delete draw by `seed`, without repetition as far as there are rows. Source of both: verl-agent's
    adjust_batch. A batch without rows stays so. Raises BatchError for a multiple below 1 or an unknown mode.
    """
    if multiple < 1:
        raise BatchError(f"a batch cannot be aligned to a multiple of {multiple} rows; use at least 1")
    if mode not in ADJUSTMENTS:
        raise BatchError(f"algo.adjust={mode} is unknown; use {', '.join(ADJUSTMENTS)}")
    batch = batch.with_columns(is_padding=padding_rows(batch))
    rows = len(batch)
    missing, over = -rows % multiple, rows % multiple
    if missing == 0:
        return batch
    drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    if mode == "delete" and rows > multiple:
        return batch.take(drawn[over:].sort().values)
    if mode == "copy":
        copies = drawn.repeat(-(-missing // rows))[:missing]
        return batch.take(torch.cat([torch.arange(rows), copies]))
    padding = StepBatch({name: _padding_column(name, column, batch, missing) for name, column in batch.items()})
    return StepBatch.concat([batch, padding]).take(_evenly_spread(rows, missing))


def real_rows(batch: StepBatch) -> StepBatch:
    """The batch without its padding rows, in order: align undone."""
    return batch.take(~padding_rows(batch))


def _evenly_spread(rows: int, extra: int) -> Tensor:
    """[rows + extra] order that puts the last `extra` rows between the others, as evenly as whole numbers allow."""
    total = rows + extra
    slot = torch.arange(1, total + 1) * extra // total  # how many padding rows have come by each place
    is_padding = torch.diff(slot, prepend=slot.new_zeros(1)) > 0
    order = torch.empty(total, dtype=torch.int64)
    order[~is_padding] = torch.arange(rows)
    order[is_padding] = torch.arange(rows, total)
    return order


def _padding_column(name: str, column: Column, batch: StepBatch, extra: int) -> Column:
    if isinstance(column, Jagged):
        return _padding_tokens(name, column, batch, extra)
    if isinstance(column, np.ndarray):
        first = len(batch)  # numbered by row, so that aligning an aligned batch again repeats no name
        own = name in ("uid", "traj_uid")
        return objects(f"padding-{first + i}" if own else None for i in range(extra))
    fill = 1 if name in ("is_padding", "is_action_valid") else 0
    return column.new_full((extra, *column.shape[1:]), fill)


def _padding_tokens(name: str, column: Jagged, batch: StepBatch, extra: int) -> Jagged:
    """One token a row, as prompts and responses have; two in a column that runs over prompt and response together."""
    tokens = 2 if _runs_over_both(column, batch) else 1
    values = column.values.new_zeros(extra * tokens)
    if name in ("prompts", "responses") and column.tokens:
        values[:] = column.values[0]
    return Jagged(values, torch.full((extra,), tokens, dtype=torch.int64))


def _runs_over_both(column: Jagged, batch: StepBatch) -> bool:
    if "prompts" not in batch or "responses" not in batch:
        return False
    return torch.equal(column.lengths, batch["prompts"].lengths + batch["responses"].lengths)
