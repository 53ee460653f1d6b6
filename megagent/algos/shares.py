"""What each data-parallel replica gets of a batch, and in which micro-batches it computes it.

By rows (trainer.micro_batch_rows) replicas get equal contiguous parts and each cuts its own. By tokens
(trainer.micro_batch_tokens) the rows of every optimizer step are dealt to the replicas by their cost, which takes the
lengths of all of them: whoever has the whole batch does it, and sends the cut along with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagent.algos.packing import pack
from megagent.algos.schedule import sizes_of, token_multiple
from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError

if TYPE_CHECKING:
    from megagent.config import Config, TrainerConfig

ATTENTION = 12  # hidden sizes: the length at which attention costs as much as the rest of a layer; see row_costs

Steps = Sequence[Jagged]


@dataclass(frozen=True)
class Share:
    """One replica's part of a pass over a batch.

    rows: [n] int64, the rows of the batch that it computes. steps: one Jagged for each optimizer step (one in all
    where nothing learns), whose row m holds the places in `rows` of micro-batch m; all replicas have equally many
    micro-batches in a step, some perhaps without a row. None: the replica cuts its rows itself.
    """

    rows: Tensor
    steps: tuple[Jagged, ...] | None = None

    def of(self, batch: StepBatch) -> StepBatch:
        """The rows to send. A replica without any is sent one, for what its micro-batches without rows run on."""
        return batch.take(self.rows if len(self.rows) else [0])


def equal_shares(rows: int, dp: int) -> list[Share]:
    """Contiguous parts of equally many rows. Raises BatchError if the rows do not divide."""
    if rows % dp:
        raise BatchError(f"{rows} rows cannot be split into {dp} equal parts; align the batch to a multiple first")
    return [Share(part) for part in torch.arange(rows).reshape(dp, -1)]


def token_shares(lengths: Tensor, config: Config, hidden: int, update: int | None = None) -> list[Share]:
    """Shares of every replica in micro-batches of at most trainer.micro_batch_tokens tokens, padding included.

    lengths: [rows] int64 tokens of prompt and response; hidden: the model's hidden size. update: counts the updates of
    a run, whose rows are shuffled anew each time into mini-batches, one optimizer step each; without it all rows are
    one step. Raises BatchError for a row longer than the budget, or without any row.
    """
    if not len(lengths):
        raise BatchError("no rows to make micro-batches of; give at least one")
    trainer, sizes = config.trainer, sizes_of(config)
    if update is None:
        steps = [torch.arange(len(lengths))]
    else:
        steps = mini_batches(len(lengths), trainer.mini_batch_rows, trainer, update)
    packings = [
        pack(
            lengths[rows],
            sizes.dp,
            trainer.micro_batch_tokens,
            sizes.micro_batch_multiple,
            quadratic_at=ATTENTION * hidden,
            end_to_end=trainer.pack_rows,
            length_multiple=token_multiple(sizes, config.parallel.sequence_parallel),
        )
        for rows in steps
    ]
    return [
        _share([[rows[part] for part in packing.ranks[rank]] for rows, packing in zip(steps, packings, strict=True)])
        for rank in range(sizes.dp)
    ]


def _share(steps: list[list[Tensor]]) -> Share:
    """steps[s][m]: rows [n] of the batch. A row that is in several steps is sent once."""
    rows, places = torch.unique(torch.cat([part for step in steps for part in step]), return_inverse=True)
    lengths = [torch.tensor([len(part) for part in step]) for step in steps]
    of_steps = torch.split(places, [int(each.sum()) for each in lengths])
    return Share(rows, tuple(Jagged(*each) for each in zip(of_steps, lengths, strict=True)))


def mini_batches(
    rows: int, mini_batch_rows: int, trainer: TrainerConfig, update: int, replica: int = 0
) -> list[Tensor]:
    """Row indices of each optimizer step of an update: trainer.epochs times all rows, in a random order each.

    The order follows from trainer.seed, the number of the update and the replica whose rows they are.
    """
    found: list[Tensor] = []
    for epoch in range(trainer.epochs if rows else 0):
        seed = trainer.seed * 1_000_003 + update * 1009 + epoch
        generator = torch.Generator().manual_seed(seed * 4096 + replica)
        found += torch.split(torch.randperm(rows, generator=generator), mini_batch_rows)
    return found


def gathered(parts: Sequence[Jagged], shares: Sequence[Share]) -> Jagged:
    """What the replicas answered for their rows, one part of each, in the order of the batch."""
    rows = torch.cat([share.rows for share in shares])
    return Jagged.concat(parts).take(torch.argsort(rows))
