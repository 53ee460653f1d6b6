"""The output layer of a value model: one number a position, in the place of the logits."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional

from megagent.parallel.output import Question, gathered, selected


class ValueHead(MegatronModule):
    """hidden -> 1, held by every tensor-parallel rank: all of them see the same hidden states and make the same step.

    It begins at zero: a value of 0 wherever the hidden states are, rather than noise that advantages would inherit.
    The answer to a question is [n, 1, 1] float32; without one there are values at all positions, [tokens, rows, 1].
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.question: Question | None = None

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """As Megatron calls an output layer; weight is None, for nothing is tied to a value head."""
        question, self.question = self.question, None
        if self.config.sequence_parallel:
            input_ = gathered(input_)
        if question is not None:
            input_ = selected(input_, question.positions)[:, None]
        # One number must carry a return of any size: bf16 would round it to three digits.
        return functional.linear(input_.float(), self.weight.float()), None
