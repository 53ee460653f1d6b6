"""Causal attention by torch's scaled_dot_product_attention, for the layer spec without Transformer Engine.

Megatron's own plain torch attention writes the whole matrix of scores several times; this one never does.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional


class TorchAttention(MegatronModule):
    """Takes the place of DotProductAttention, for causal self-attention without dropout and without windows."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **groups: Any,
    ) -> None:
        """As Megatron calls it. groups: process groups and the like, which heads that are split already do not need."""
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if attn_mask_type != AttnMaskType.causal or dropout or config.window_size is not None:
            raise ValueError(
                f"attn_mask_type={attn_mask_type}, attention dropout {dropout}, window {config.window_size}: "
                "TorchAttention is causal, without dropout and windows; use another core attention in the layer spec"
            )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """query: [tokens, rows, heads, head_dim]; key, value: [tokens, rows, groups, head_dim].

        Returns [tokens, rows, heads x head_dim]. Raises ValueError for what it cannot do, rather than ignore it.
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("TorchAttention takes no mask, bias or packed sequences: rows are right-padded")
        out = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != query.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)
