"""A model that learns on one rank: what the policy and the critic have in common.

Losses are sums over tokens divided by a count that all replicas share, so neither the cut into micro-batches nor the
number of replicas changes a gradient (beyond the order of float sums).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megagent.batch import Jagged
from megagent.config import Config
from megagent.errors import MegagentError
from megagent.parallel import platform, schedule
from megagent.parallel.model import Stage
from megagent.parallel.optimizer import Optimizer
from megagent.parallel.topology import Topology


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

    def _mini_batches(self, rows: int) -> list[Tensor]:
        """Row indices of each optimizer step of an update: trainer.epochs times all rows of the replica."""
        mini_batch_rows = self.config.trainer.mini_batch_rows // self.topology.dp
        epochs = range(self.config.trainer.epochs)
        return [part for epoch in epochs for part in torch.split(self._shuffled(rows, epoch), mini_batch_rows)]

    def _shuffled(self, rows: int, epoch: int) -> Tensor:
        """A random order of the replica's rows: the same on its tensor and pipeline ranks, and after a resume."""
        generator = torch.Generator()
        seed = self.config.trainer.seed * 1_000_003 + self.updates * 1009 + epoch
        generator.manual_seed(seed * 4096 + self.topology.dp_rank)
        return torch.randperm(rows, generator=generator)

    def _totals(self, per_row: Tensor, mini_batches: list[Tensor]) -> list[float]:
        """Sums of per_row [rows] over each mini-batch and all replicas."""
        return self.topology.sum_over_replicas([float(per_row[rows].sum()) for rows in mini_batches]).tolist()

    def _cut(self, sequences: schedule.Sequences, rows: Tensor, micro_batch_rows: int) -> list[Tensor]:
        return schedule.by_length(sequences, rows, micro_batch_rows, self.stage.micro_batch_multiple)

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


def restored(parts: list[Tensor], cut: list[Tensor], responses: Jagged) -> Jagged:
    """Values of micro-batches, put back into the order of the rows. parts: [n] of each micro-batch in `cut`."""
    order = torch.cat(cut)
    # A micro-batch without any response token has predicted one all the same; see Sequences.micro_batch.
    wanted = [int(responses.lengths[rows].sum()) for rows in cut]
    values = torch.cat([part[:count] for part, count in zip(parts, wanted, strict=True)]).float().cpu()
    return Jagged(values, responses.lengths[order]).take(torch.argsort(order))
