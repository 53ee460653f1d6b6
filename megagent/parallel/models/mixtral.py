"""Mixtral: Mistral's attention, and in every layer a softmax router over a few wide experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megagent.parallel.models.architecture import Architecture
from megagent.parallel.models.blocks import mixture_decoder
from megagent.parallel.models.family import Family
from megagent.parallel.models.hf_config import ConfigReader


def _read(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.sliding_window(fields["positions"], fields["layers"])
    reader.only("router_jitter_noise", 0, "log-probs have to be the same each time; set it to 0")
    return {"experts": reader.experts(ffn=fields["ffn"], renormalised=True)}


def _write(architecture: Architecture) -> dict[str, Any]:
    return {"sliding_window": None, "router_jitter_noise": 0.0, "num_local_experts": architecture.expert_count}


MIXTRAL = Family(
    name="mixtral",
    hf_class="MixtralForCausalLM",
    model_type="mixtral",
    tensors=mixture_decoder("block_sparse_moe", gate="w1", up="w3", down="w2"),
    read=_read,
    write=_write,
    defaults=MappingProxyType({"num_key_value_heads": 8, "rope_theta": 1000000.0}),
)
