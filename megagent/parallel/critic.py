"""The critic on one rank: values by teacher forcing, and their update. It has a model and an optimizer of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from megagent.algos.shares import Steps
from megagent.algos.values import VALUE_METRICS, value_loss
from megagent.batch import Jagged, StepBatch
from megagent.parallel import schedule
from megagent.parallel.learner import Learner, restored
from megagent.parallel.schedule import MicroBatch


class Critic(Learner):
    """A value model over the actor's ranks, cut as the actor is. Every method is collective over all ranks.

    The value of a response token is what the critic expects before that token is written: it comes from the hidden
    state at the token before, where the policy's log-prob of it comes from.
    """

    name = "critic"

    def values(self, shard: StepBatch, steps: Steps | None = None) -> Jagged | None:
        """The value of every response token: Jagged float32 over the responses, in the order of the replica's rows.

        steps: as for Policy.log_probs. On the replica's speaking rank (last stage, first tensor rank), None on others.
        """
        sequences = schedule.response_sequences(shard)
        cut = self._whole_cut(sequences, steps, self.config.trainer.log_prob_micro_batch_rows)
        results = schedule.run(self.stage, sequences, cut, _values_of, forward_only=True)
        if not self.topology.speaks:
            return None
        return restored([result["values"] for result in results], cut, shard["responses"])

    def update(self, shard: StepBatch, steps: Steps | None = None) -> dict[str, float]:
        """The clipped value loss on the replica's rows: epochs x mini-batches, one optimizer step each.

        shard needs prompts, responses, response_mask, values and value_targets; steps: as for Policy.update. Returns
        VALUE_METRICS as means over loss tokens, the mean norm of the gradients before clipping, the last learning rate,
        the padding and the imbalance of the schedule, the same on every rank. Raises TrainingDivergedError as
        Policy.update does.
        """
        columns = ["response_mask", "values", "value_targets"]
        sequences = schedule.response_sequences(shard, columns, mask="response_mask")
        cuts = self._training_cuts(sequences, steps)
        counts = self._totals(_loss_tokens(shard), cuts)

        totals = torch.zeros(len(VALUE_METRICS), dtype=torch.float64)
        norms, lr = [], self.optimizer.lr
        for cut, count in zip(cuts, counts, strict=True):
            if count == 0:  # padding rows only
                continue
            loss = _ValueLoss(self.config.critic.clip, count)
            results = schedule.run(self.stage, sequences, cut, loss, forward_only=False)
            sums = self._shared_sums(results, (*VALUE_METRICS, "loss"))
            norms.append(self._step(float(sums[-1])))
            totals += sums[:-1]
        self.updates += 1
        self.optimizer.advance()
        means = totals / max(sum(counts), 1.0)
        return {
            **dict(zip(VALUE_METRICS, means.tolist(), strict=True)),
            "critic/grad_norm": sum(norms) / max(len(norms), 1),
            "critic/lr": lr,
            **self._cut_metrics(sequences, cuts),
        }


def _values_of(micro_batch: MicroBatch, answer: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    values = answer[:, 0]
    return values.sum(), {"values": values}


class _ValueLoss:
    """value_loss of a micro-batch, against the number of loss tokens in its whole mini-batch."""

    def __init__(self, clip: float, denominator: float) -> None:
        self.clip = clip
        self.denominator = denominator

    def __call__(self, micro_batch: MicroBatch, answer: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = value_loss(answer[:, 0], micro_batch.columns, self.clip, self.denominator)
        return loss, {**sums, "loss": loss.detach()}


def _loss_tokens(shard: StepBatch) -> Tensor:
    """[rows] int64: how many of its tokens carry loss."""
    mask: Jagged = shard["response_mask"]
    return mask.like(mask.values != 0).sums()
