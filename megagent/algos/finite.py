"""Where a number that is none came from, before it is part of a mean.

One NaN among the rewards of a task spoils all its advantages, and the loss then names none of them. One -inf among the
log-probs is worse: ratios are held to limits, so that it becomes a large finite number and nobody is told.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagent.algos.groups import padding_rows
from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError

# Column -> who gave it.
_OF_ROWS = {
    "rewards": "the environment",
    "episode_rewards": "the environment",
    "baseline_rewards": "the environment",
}
_OF_TOKENS = {
    "old_log_probs": "the trainer",
    "rollout_log_probs": "the engine",
    "ref_log_probs": "the reference",
    "values": "the critic",
}


def require_finite(batch: StepBatch) -> None:
    """Raises BatchError if a reward, or a log-prob or value of a loss token, is NaN or infinite.

    All columns that have one are named, each with its first place. Padding rows and masked tokens may hold anything.
    """
    real = ~padding_rows(batch)
    faults = []
    for name, giver in _OF_ROWS.items():
        if name in batch:
            rows = torch.nonzero(~batch[name].isfinite() & real).reshape(-1)
            if len(rows):
                row = int(rows[0])
                faults.append(f"{name}, from {giver}: {float(batch[name][row])} in {_place(batch, row, len(rows))}")
    for name, giver in _OF_TOKENS.items():
        if name in batch:
            column, tokens = batch[name], _loss_tokens(batch, real)
            places = torch.nonzero(~column.values.isfinite() & tokens).reshape(-1)
            if len(places):
                place = int(places[0])
                row = int(column.row_of_token[place])
                token = place - int(column.offsets[row])
                faults.append(
                    f"{name}, from {giver}: {float(column.values[place])} for response token {token} of "
                    f"{_place(batch, row, len(places))}"
                )
    if faults:
        raise BatchError(
            f"no advantage can be made of what is not a finite number: {'; '.join(faults)}. If weights have grown out "
            "of range (actor/grad_norm of the last iterations), go on from the last checkpoint with a lower learning "
            "rate."
        )


def _loss_tokens(batch: StepBatch, real: Tensor) -> Tensor:
    mask: Jagged = batch["response_mask"]
    return (mask.values != 0) & mask.spread(real).values


def _place(batch: StepBatch, row: int, count: int) -> str:
    step = f" (step {int(batch['step_index'][row]) + 1} of {batch['traj_uid'][row]})" if _is_named(batch) else ""
    return f"row {row}{step}" + (f", the first of {count}" if count > 1 else "")


def _is_named(batch: StepBatch) -> bool:
    return "step_index" in batch and "traj_uid" in batch
