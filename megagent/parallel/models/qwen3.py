"""Qwen3 (dense): grouped-query attention with a norm on each head's q and k, no biases, a head_dim of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megagent.parallel.models.architecture import Architecture
from megagent.parallel.models.blocks import dense_decoder
from megagent.parallel.models.family import Family
from megagent.parallel.models.hf_config import ConfigReader

NO_BIAS = "Megatron has a bias on the output of attention only together with biases in the MLP; choose another model"


def _read(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.sliding_window(fields["positions"], fields["layers"])
    reader.only("attention_bias", False, NO_BIAS)
    return {"qk_norm": True}


def _write(architecture: Architecture) -> dict[str, Any]:
    return {"use_sliding_window": False, "attention_bias": False}


QWEN3 = Family(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    model_type="qwen3",
    tensors=dense_decoder(),
    read=_read,
    write=_write,
    defaults=MappingProxyType({"num_key_value_heads": 32, "head_dim": 128}),
)
