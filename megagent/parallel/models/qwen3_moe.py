"""Qwen3 mixtures: Qwen3's attention, and in every layer a softmax router over many narrow experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megagent.parallel.models.architecture import Architecture
from megagent.parallel.models.blocks import mixture_decoder
from megagent.parallel.models.family import Family
from megagent.parallel.models.hf_config import ConfigReader
from megagent.parallel.models.qwen3 import NO_BIAS

_EVERY_LAYER = "only models with experts in every layer are supported; choose another model"


def _read(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.sliding_window(fields["positions"], fields["layers"])
    reader.only("attention_bias", False, NO_BIAS)
    reader.only("decoder_sparse_step", 1, _EVERY_LAYER)
    reader.only("mlp_only_layers", [], _EVERY_LAYER)
    experts = reader.experts(ffn=reader.integer("moe_intermediate_size"), renormalised=reader.flag("norm_topk_prob"))
    return {"qk_norm": True, "experts": experts}


def _write(architecture: Architecture) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": architecture.expert_count,
        "moe_intermediate_size": architecture.expert_ffn,
        "norm_topk_prob": architecture.experts is not None and architecture.experts.renormalised,
    }


QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    tensors=mixture_decoder("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    read=_read,
    write=_write,
    defaults=MappingProxyType({"num_key_value_heads": 4}),
)
