"""RMSNorm for the layer spec without Transformer Engine: torch's, fit for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class TorchNorm(torch.nn.RMSNorm):
    """Takes the place of Megatron's own torch norm, which refuses sequence parallelism.

    There each rank sees other tokens, so the weight's gradients are to be added up over the tensor-parallel ranks.
    Megatron does so for parameters that carry the mark `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """As Megatron calls it."""
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
