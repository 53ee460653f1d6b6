"""Causal attention by torch's scaled_dot_product_attention, for the layer spec without Transformer Engine.

Megatron's own plain torch attention writes the whole matrix of scores several times; this one never does.
"""

from __future__ import annotations

from typing import Any

import torch
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

        packed_seq_params (Megatron's PackedSeqParams): rows lie end to end, without the axis of rows: [tokens, heads,
        head_dim] and [tokens, groups, head_dim]. Returns [tokens, rows, heads x head_dim], a row where it is packed.
        Raises ValueError for what it cannot do, rather than ignore it.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("TorchAttention takes no mask or bias: rows are right-padded or packed")
        if packed_seq_params is None:
            return self._attend(query, key, value)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        rows = zip(*(tensor[:, None].split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([self._attend(*row) for row in rows])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != query.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)
