"""Mistral (dense): Llama's layers without biases; a sliding window is refused where it could take effect."""

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
    return {}


def _write(architecture: Architecture) -> dict[str, Any]:
    return {"sliding_window": None}  # transformers' default is a window of 4096


MISTRAL = Family(
    name="mistral",
    hf_class="MistralForCausalLM",
    model_type="mistral",
    tensors=dense_decoder(),
    read=_read,
    write=_write,
    defaults=MappingProxyType({"num_key_value_heads": 8, "sliding_window": 4096}),
)
