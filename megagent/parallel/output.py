"""The output layer of the last stage, asked about chosen tokens instead of all of them.

Prompts are ten times as long as responses, and logits are the largest tensors there are: the layer looks only at the
positions that predict a wanted token, and gives two numbers for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megagent.parallel.log_probs import Scoring, token_log_probs


@dataclass(frozen=True)
class Question:
    """What the next forward pass is to compute.

    positions: [n] int64, token x rows + row, of the hidden states [tokens, rows, hidden]; targets: [n] int64, the
    tokens that they predict; scoring: how these are scored, None for the logits themselves.
    """

    positions: Tensor
    targets: Tensor
    scoring: Scoring | None


class OutputLayer(tensor_parallel.ColumnParallelLinear):
    """Megatron's output layer, with a question that lasts for one forward pass. Without one it is what it was.

    The answer is [n, 1, 2], log-prob and entropy of each target in float32, or [n, 1, vocabulary / tp] logits.
    """

    question: Question | None
    vocab: int

    @staticmethod
    def take_over(layer: tensor_parallel.ColumnParallelLinear, vocab: int) -> None:
        """Make the layer one of this class. Megatron builds it by itself, together with its ties and marks.

        vocab: number of entries without padding.
        """
        layer.__class__ = OutputLayer
        layer.question, layer.vocab = None, vocab
        layer.gathers = layer.sequence_parallel
        if layer.gathers:
            # forward() gathers the positions, so that those without a wanted token can be left out.
            layer.sequence_parallel, layer.allreduce_dgrad = False, True

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron calls it. input_: [tokens, rows, hidden], of this rank's tokens with sequence parallelism."""
        question, self.question = self.question, None
        if self.gathers:
            input_ = gathered(input_)
        if question is None:
            return super().forward(input_, weight, runtime_gather_output)
        hidden = selected(input_, question.positions)
        if question.scoring is None:
            return super().forward(hidden[:, None], weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        answer = token_log_probs(
            hidden, weight, question.targets, self.tp_group, vocab=self.vocab, scoring=question.scoring
        )
        return torch.stack(answer, dim=-1)[:, None], None


def gathered(hidden: Tensor) -> Tensor:
    """[tokens, rows, hidden] of all tensor-parallel ranks, where each has its own tokens.

    Whoever uses them gives each rank the whole gradient; it keeps what belongs to its tokens.
    """
    return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)


def selected(hidden: Tensor, positions: Tensor) -> Tensor:
    """[n, hidden size] of hidden states [tokens, rows, hidden size] at positions [n], token x rows + row."""
    return hidden.flatten(0, 1).index_select(0, positions)
