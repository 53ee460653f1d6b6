"""Qwen2 and Qwen2.5 (dense): grouped-query attention, biases on q, k and v only, SwiGLU, RMSNorm."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megagent.parallel.models.architecture import Architecture
from megagent.parallel.models.blocks import dense_decoder
from megagent.parallel.models.family import Family
from megagent.parallel.models.hf_config import ConfigReader


def _read(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.sliding_window(fields["positions"], fields["layers"])
    reader.only("use_mrope", False, "rotary embedding of images is not supported; choose another model")
    return {"qkv_bias": True}


def _write(architecture: Architecture) -> dict[str, Any]:
    return {"use_sliding_window": False}


QWEN2 = Family(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    model_type="qwen2",
    tensors=dense_decoder(),
    read=_read,
    write=_write,
    defaults=MappingProxyType({"num_key_value_heads": 32}),
)
