"""A model that learns on one rank: what the policy and the critic have in common.

Losses are sums over tokens divided by a count that all replicas share, so neither the cut into micro-batches nor the
number of replicas changes a gradient (beyond the order of float sums).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megagent.algos.packing import dp_imbalance, laid_tokens, padding_waste
from megagent.algos.shares import Steps, mini_batches
from megagent.batch import Jagged
from megagent.config import Config
from megagent.errors import BatchError, MegagentError
from megagent.parallel import platform, schedule
from megagent.parallel.model import Stage
from megagent.parallel.optimizer import Optimizer
from megagent.parallel.topology import Topology

Cut = list[Tensor]  # row indices [n] of each micro-batch


class TrainingDivergedError(MegagentError):
    """A loss or a gradient that is not a number."""


class Learner:
    """A stage of a model and its optimizer. Every method is collective over all ranks."""

    name = "model"  # in errors

    def __init__(self, config: Config, topology: Topology, stage: Stage, optimizer: Optimizer) -> None:
        self.config = config
        self.topology = topology
        self.stage = stage
        self.optimizer = optimizer
        self.steps = 0  # optimizer steps of this process; errors name them
        self.updates = 0  # calls of update(); part of a checkpoint, for the order of rows follows from it

    def _training_cuts(self, sequences: schedule.Sequences, steps: Steps | None) -> list[Cut]:
        """The micro-batches of every optimizer step of an update: those of `steps`, or by trainer.micro_batch_rows."""
        if steps is not None:
            return [step.rows() for step in steps]
        trainer, topology = self.config.trainer, self.topology
        rows = trainer.mini_batch_rows // topology.dp
        found = mini_batches(len(sequences), rows, trainer, self.updates, topology.dp_rank)
        return [self._by_rows(sequences, each, trainer.micro_batch_rows) for each in found]

    def _whole_cut(self, sequences: schedule.Sequences, steps: Steps | None, micro_batch_rows: int) -> Cut:
        """The micro-batches of a pass over all rows: those of the only step in `steps`, or by their number of rows."""
        if steps is not None:
            [step] = steps
            return step.rows()
        return self._by_rows(sequences, torch.arange(len(sequences)), micro_batch_rows)

    def _by_rows(self, sequences: schedule.Sequences, rows: Tensor, micro_batch_rows: int) -> Cut:
        if tokens := self.config.trainer.micro_batch_tokens:
            raise BatchError(
                f"trainer.micro_batch_tokens={tokens}: rows come with their micro-batches, and these have none; deal "
                "them with algos.shares.token_shares"
            )
        return schedule.by_length(sequences, rows, micro_batch_rows, self.stage.micro_batch_multiple)

    def _totals(self, per_row: Tensor, cuts: Sequence[Cut]) -> list[float]:
        """Sums of per_row [rows] over each optimizer step and all replicas."""
        return self.topology.sum_over_replicas([float(per_row[torch.cat(cut)].sum()) for cut in cuts]).tolist()

    def _cut_metrics(self, sequences: schedule.Sequences, cuts: Sequence[Cut]) -> dict[str, float]:
        """Over the optimizer steps of an update and all replicas: schedule/padding_waste, the share of the computed
        tokens that are padding, and schedule/dp_imbalance, how far the busiest replica of a step is above the mean."""
        lengths, topology = sequences.tokens.lengths, self.topology
        tokens = torch.zeros(len(cuts), topology.dp, dtype=torch.float64)
        tokens[:, topology.dp_rank] = torch.tensor([float(lengths[torch.cat(cut)].sum()) for cut in cuts])
        laid = sum(
            laid_tokens(lengths[part], self.stage.packs, self.stage.length_multiple) for cut in cuts for part in cut
        )
        sums = topology.sum_over_replicas([*tokens.reshape(-1).tolist(), laid])
        return {
            "schedule/padding_waste": padding_waste(float(sums[:-1].sum()), float(sums[-1])),
            "schedule/dp_imbalance": dp_imbalance(sums[:-1].reshape(tokens.shape)),
        }

    def _shared_sums(self, results: list[dict[str, Tensor]], names: Iterable[str]) -> Tensor:
        """[names] float64: sums of scalars over micro-batches and replicas, on every rank; a missing one is 0."""
        names = list(names)
        local = torch.zeros(len(names), dtype=torch.float64)
        if self.topology.is_last_stage:
            zero = torch.zeros((), device=platform.current().device)
            table = torch.stack([torch.stack([result.get(name, zero) for name in names]) for result in results])
            local = self.topology.sum_over_replicas(table.double().sum(dim=0))
        return self.topology.from_last_stage(local)

    def _step(self, loss: float) -> float:
        """The optimizer's step. All ranks know the same loss and norm, so all of them raise or none."""
        if not math.isfinite(loss):
            raise TrainingDivergedError(
                f"the loss of optimizer step {self.steps} is {loss}; lower the learning rate or look for bad rows "
                f"(advantages, old log-probs). The {self.name}'s weights are those before this step."
            )
        norm = self.optimizer.step()
        if not math.isfinite(norm):
            raise TrainingDivergedError(
                f"the gradient norm of optimizer step {self.steps} is {norm}; lower the learning rate and go back "
                f"to the last checkpoint: the {self.name}'s weights in memory are spoilt."
            )
        self.steps += 1
        return norm


def restored(parts: list[Tensor], cut: Cut, responses: Jagged) -> Jagged:
    """Values of micro-batches, put back into the order of the rows. parts: [n] of each micro-batch in `cut`."""
    order = torch.cat(cut)
    # A micro-batch without any response token has predicted one all the same; see Sequences.micro_batch.
    wanted = [int(responses.lengths[rows].sum()) for rows in cut]
    values = torch.cat([part[:count] for part, count in zip(parts, wanted, strict=True)]).float().cpu()
    return Jagged(values, responses.lengths[order]).take(torch.argsort(order))
