"""Where a row's reward sits among its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megagent.algos.groups import padding_rows
from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError


def place_episode_reward(batch: StepBatch) -> StepBatch:
    """Adds token_rewards: the episode's reward on the last valid response token of every step row, 0 elsewhere.

    Every step of an episode carries the whole episode's reward: a row is one training example, and the outcome is
    what it is judged by. Needs episode_rewards [rows] and response_mask. Padding rows get nothing.
    Raises BatchError for a row that is not padding and has no response token.
    Source: verl-agent's episode reward manager.
    """
    rewards = torch.where(padding_rows(batch), 0.0, batch["episode_rewards"].to(torch.float32))
    empty = batch["response_mask"].like(torch.zeros(batch["response_mask"].tokens))
    return batch.with_columns(token_rewards=add_to_last_token(empty, rewards, batch))


def add_to_last_token(column: Jagged, per_row: Tensor, batch: StepBatch) -> Jagged:
    """A copy of `column` (Jagged over the responses) with per_row [rows] added on each row's last valid token.

    The last valid token is the last with response_mask 1; in a row where none carries loss, the last one.
    """
    at, rows = last_valid_token(batch)
    values = column.values.clone()
    values[at] += per_row[rows].to(values.dtype)
    return column.like(values)


def last_valid_token(batch: StepBatch) -> tuple[Tensor, Tensor]:
    """(positions among all response tokens [n], their rows [n]); n counts the rows with at least one token.

    Raises BatchError for a row that is not padding and has no response token.
    """
    mask: Jagged = batch["response_mask"]
    missing = (mask.lengths == 0) & ~padding_rows(batch)
    if bool(missing.any()):
        row = int(torch.nonzero(missing)[0])
        raise BatchError(f"row {row} has an empty response, so no token can carry its reward; drop it or keep its EOS")
    rows = torch.nonzero(mask.lengths > 0).reshape(-1)
    last = mask.offsets[1:] - 1
    # Nearly every row ends in a loss token; only the others are searched.
    unsure = rows[mask.values[last[rows]] == 0]
    tails = mask.take(unsure)
    tail = tails.row_of_token
    position = torch.arange(tails.tokens) + (mask.offsets[unsure] - tails.offsets[:-1])[tail]
    loss_tokens = tails.values != 0
    found = torch.full((len(tails),), -1, dtype=torch.int64)
    found.scatter_reduce_(0, tail[loss_tokens], position[loss_tokens], "amax")
    last[unsure] = torch.where(found >= 0, found, last[unsure])
    return last[rows], rows
