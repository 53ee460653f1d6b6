"""Llama 2 and 3.x (dense): grouped-query attention, SwiGLU, RMSNorm; from 3.1 on a rotary embedding that is scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagent.parallel.models.architecture import Architecture
from megagent.parallel.models.blocks import dense_decoder
from megagent.parallel.models.family import Family
from megagent.parallel.models.hf_config import ConfigReader


def _read(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    attention, mlp = reader.flag("attention_bias"), reader.flag("mlp_bias")
    if attention != mlp:
        reader.problem(
            f"attention_bias={attention} and mlp_bias={mlp}: Megatron has biases in both or in neither; "
            "choose another model"
        )
    return {"qkv_bias": attention, "linear_bias": mlp}


def _write(architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": architecture.qkv_bias, "mlp_bias": architecture.linear_bias}


LLAMA = Family(
    name="llama",
    hf_class="LlamaForCausalLM",
    model_type="llama",
    tensors=dense_decoder(),
    read=_read,
    write=_write,
    scaled_rope=True,
)
