"""The policy on one rank: log-probs by teacher forcing, the PPO update and the supervised one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from megagent.algos.losses import LOSS_METRICS, loss_shares, mean_metrics, policy_loss, with_loss_columns
from megagent.algos.shares import Steps
from megagent.batch import Jagged, StepBatch
from megagent.config import AlgoConfig, Config
from megagent.errors import MegagentError
from megagent.parallel import platform, schedule
from megagent.parallel.learner import Learner, restored
from megagent.parallel.log_probs import Scoring
from megagent.parallel.model import Stage
from megagent.parallel.optimizer import Optimizer
from megagent.parallel.schedule import MicroBatch
from megagent.parallel.topology import Topology


class Reference:
    """The weights that the actor began with. Nothing is copied before the actor first changes.

    There is no second model: the copies rest on the host (pinned on CUDA) and take the place of the actor's weights
    while the reference's log-probs are computed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._copies: list[Tensor] | None = None
        self._dropped = False

    def drop(self) -> None:
        """The actor's weights will change and no reference is wanted; asking for it from then on is an error."""
        self._dropped = self._copies is None

    def keep(self) -> None:
        """To be called before the actor's weights change; only the first call copies."""
        if self._copies is None and not self._dropped:
            self._copies = [platform.current().host(parameter.data) for parameter in self._parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference's weights inside this context."""
        if self._dropped:
            raise RuntimeError("supervised training keeps no reference policy")
        if self._copies is None:
            yield
            return
        # Pointers move, not contents: the actor's tensors are views of Megatron's parameter buffers.
        own = [parameter.data for parameter in self._parameters]
        try:
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                parameter.data = platform.current().to_device(copy)
            yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data


class Policy(Learner):
    """Actor and reference on this rank. Every method is collective over all ranks."""

    name = "actor"

    def __init__(self, config: Config, topology: Topology, stage: Stage, optimizer: Optimizer) -> None:
        super().__init__(config, topology, stage, optimizer)
        self.reference = Reference(stage.parameters())

    # --- log-probs ---------------------------------------------------------------------------------------------------

    def log_probs(
        self, shard: StepBatch, model: Literal["actor", "reference"], steps: Steps | None = None
    ) -> dict[str, Jagged] | None:
        """Log-prob of every response token and the entropy at it, at the rollout's temperature.

        shard: the replica's rows; steps: their micro-batches (algos.shares), of log_prob_micro_batch_rows by default.
        Returns {"log_probs", "entropy"}, Jagged float32 over the responses of the rows in micro-batches, in the order
        of the shard, on the replica's speaking rank (last stage, first tensor rank), None on the others.
        """
        sequences = schedule.response_sequences(shard)
        cut = self._whole_cut(sequences, steps, self.config.trainer.log_prob_micro_batch_rows)
        weights = self.reference.in_place() if model == "reference" else contextlib.nullcontext()
        with weights:
            scoring = Scoring(self.config.rollout.temperature)
            results = schedule.run(self.stage, sequences, cut, _log_probs_of, forward_only=True, scoring=scoring)
        if not self.topology.speaks:
            return None
        return {
            name: restored([result[name] for result in results], cut, shard["responses"])
            for name in ("log_probs", "entropy")
        }

    # --- reinforcement learning --------------------------------------------------------------------------------------

    def update(self, shard: StepBatch, steps: Steps | None = None) -> dict[str, float]:
        """PPO on the replica's rows: epochs x mini-batches, one optimizer step each.

        shard needs prompts, responses, response_mask, old_log_probs, advantages, and ref_log_probs if there is a KL
        term. steps: the micro-batches of each optimizer step (algos.shares); by default rows are shuffled anew in every
        epoch, within the replica, and cut by trainer.micro_batch_rows. Returns LOSS_METRICS by algo.aggregation, the
        mean norm of the gradients before clipping, the last learning rate, the padding and the imbalance of the
        schedule, the same on every rank.
        Raises TrainingDivergedError, on every rank, before weights change if a loss is not finite, and after if only
        a gradient is not.
        """
        algo = self.config.algo
        shard = with_loss_columns(shard, algo)
        columns = ["response_mask", "old_log_probs", "advantages", "token_weights", "loss_rows"]
        columns += ["ref_log_probs"] if algo.kl_coef else []
        sequences = schedule.response_sequences(shard, columns, mask="response_mask")
        self.reference.keep()
        cuts = self._training_cuts(sequences, steps)
        counts = self._totals(loss_shares(shard, algo), cuts)

        totals = torch.zeros(len(LOSS_METRICS), dtype=torch.float64)
        norms, lr = [], self.optimizer.lr
        # Without a coefficient the entropy is a figure to look at and needs no gradient.
        scoring = Scoring(self.config.rollout.temperature, entropy_gradient=algo.entropy_coef != 0)
        for cut, count in zip(cuts, counts, strict=True):
            if count == 0:  # padding rows only: nothing to learn, and Adam's momentum should not move either
                continue
            loss = _PpoLoss(algo, count)
            results = schedule.run(self.stage, sequences, cut, loss, forward_only=False, scoring=scoring)
            sums = self._shared_sums(results, (*LOSS_METRICS, "loss"))
            lr = self.optimizer.lr
            norms.append(self._step(float(sums[-1])))
            totals += sums[:-1]
        self.updates += 1
        self.optimizer.advance()
        named = dict(zip(LOSS_METRICS, totals.tolist(), strict=True))
        if not algo.kl_coef:
            named.pop("actor/kl_loss")
        return {
            **mean_metrics(named, sum(counts)),
            "actor/grad_norm": sum(norms) / max(len(norms), 1),
            "actor/lr": lr,
            **self._cut_metrics(sequences, cuts),
        }

    # --- supervised --------------------------------------------------------------------------------------------------

    def supervised_update(self, shard: StepBatch, steps: Steps | None = None) -> dict[str, float]:
        """One optimizer step on the mean of -log p over tokens, weighted by the column loss_weights.

        loss_weights: Jagged over prompt and response tokens. steps: the micro-batches of the step, by
        trainer.micro_batch_rows by default. Returns sft/loss, sft/grad_norm and sft/lr, the same on every rank. Raises
        TrainingDivergedError as update() does.
        """
        sequences = schedule.weighted_sequences(shard)
        self.reference.drop()
        cut = self._whole_cut(sequences, steps, self.config.trainer.micro_batch_rows)
        weights = sequences.tokens.like(sequences.columns["loss_weights"].values * sequences.wanted.values)
        [total] = self._totals(weights.to(torch.float64).sums(), [cut])
        if total <= 0:
            raise MegagentError(
                f"the loss weights of the batch sum to {total}; give at least one token a weight above 0"
            )

        def loss(micro_batch: MicroBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value = -(scores[:, 0] * micro_batch.columns["loss_weights"]).sum() / total
            return value, {"loss": value.detach()}

        results = schedule.run(self.stage, sequences, cut, loss, forward_only=False, scoring=Scoring())
        mean = float(self._shared_sums(results, ("loss",))[0])
        metrics = {"sft/loss": mean, "sft/grad_norm": self._step(mean), "sft/lr": self.optimizer.lr}
        self.optimizer.advance()
        return metrics


def _log_probs_of(micro_batch: MicroBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs, entropy = scores.unbind(-1)
    return log_probs.sum(), {"log_probs": log_probs, "entropy": entropy}


class _PpoLoss:
    """policy_loss of a micro-batch, against the denominator of its whole mini-batch."""

    def __init__(self, algo: AlgoConfig, denominator: float) -> None:
        self.algo = algo
        self.denominator = denominator

    def __call__(self, micro_batch: MicroBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        columns: Mapping[str, Tensor] = micro_batch.columns
        log_probs, entropy = scores.unbind(-1)
        # Without a coefficient the entropy is a figure to look at and needs no gradient.
        entropy = entropy if self.algo.entropy_coef else entropy.detach()
        loss, sums = policy_loss(log_probs, columns, entropy, self.algo, self.denominator)
        return loss, {**sums, "loss": loss.detach()}
