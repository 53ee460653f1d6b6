"""What a model family is: one immutable table of tensors, and how its config.json is read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megagent.parallel.models.architecture import Architecture, Rope
from megagent.parallel.models.blocks import TIE
from megagent.parallel.models.hf_config import BELONGING, ConfigReader
from megagent.parallel.models.rows import Row, Tie


@dataclass(frozen=True, kw_only=True)
class Family:
    """One file of models/.

    hf_class, model_type: as in config.json (`architectures`, `model_type`); tensors: the table.
    read: the fields of Architecture that only some families have, from what `common` does not read;
    write: the keys of config.json that say the same.
    defaults: what transformers assumes of keys that are absent, where that is more than "not there".
    """

    name: str
    hf_class: str
    model_type: str
    tensors: tuple[Row, ...]
    read: Callable[[ConfigReader, Mapping[str, Any]], Mapping[str, Any]]
    write: Callable[[Architecture], Mapping[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    scaled_rope: bool = False
    ties: Tie = TIE

    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        """The model that a config.json describes. Raises ConfigError with everything in it that is missing, not known,
        or cannot be expressed."""
        reader = ConfigReader(hf_config, self.name, self.defaults)
        reader.only("model_type", self.model_type, f"{self.hf_class} is of type {self.model_type}; {BELONGING}")
        fields = common(reader, self.scaled_rope)
        fields |= self.read(reader, fields)
        reader.finish()
        return Architecture(family=self.name, tensors=self.tensors, ties=self.ties, **fields)

    def hf_config(self, architecture: Architecture) -> dict[str, Any]:
        """The config.json of an architecture, without the keys that only concern generation (token ids, dtype)."""
        rope = architecture.rope
        config: dict[str, Any] = {
            "architectures": [self.hf_class],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "num_hidden_layers": architecture.layers,
            "vocab_size": architecture.vocab,
            "hidden_size": architecture.hidden,
            "intermediate_size": architecture.ffn,
            "num_attention_heads": architecture.heads,
            "num_key_value_heads": architecture.kv_heads,
            "head_dim": architecture.head_dim,
            "max_position_embeddings": architecture.positions,
            "rms_norm_eps": architecture.norm_eps,
            "initializer_range": architecture.init_std,
            "tie_word_embeddings": architecture.tied,
            "attention_dropout": 0.0,
            # The older of the two spellings: every version of transformers reads it.
            "rope_theta": rope.theta,
        }
        if rope.factor is not None:
            config["rope_scaling"] = {"rope_type": "llama3", "factor": rope.factor, **Rope.LLAMA3}
        if architecture.experts is not None:
            config |= {
                "num_experts_per_tok": architecture.experts.per_token,
                "output_router_logits": architecture.experts.aux_loss > 0,
                "router_aux_loss_coef": architecture.experts.aux_loss,
            }
        return config | dict(self.write(architecture))


def common(reader: ConfigReader, scaled_rope: bool) -> dict[str, Any]:
    """The fields of Architecture that every family reads alike."""
    heads = reader.integer("num_attention_heads")
    hidden = reader.integer("hidden_size")
    kv_heads = reader.integer("num_key_value_heads", default=heads)
    head_dim = reader.integer("head_dim", default=0, at_least=0)
    sound = not reader.problems  # a number that is missing contradicts nothing
    if sound and not head_dim and hidden % heads:
        reader.problem(f"num_attention_heads={heads} does not divide hidden_size={hidden}; set head_dim if so meant")
    if sound and heads % kv_heads:
        reader.problem(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}; {BELONGING}")
    reader.only("hidden_act", "silu", "only silu is supported; choose another model")
    reader.only("attention_dropout", 0, "log-probs have to be the same each time; set it to 0")
    return {
        "layers": reader.integer("num_hidden_layers"),
        "vocab": reader.integer("vocab_size"),
        "hidden": hidden,
        "ffn": reader.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "positions": reader.integer("max_position_embeddings"),
        "norm_eps": reader.number("rms_norm_eps"),
        "init_std": reader.number("initializer_range", default=0.02),
        "rope": reader.rope(scaled=scaled_rope),
        "tied": reader.flag("tie_word_embeddings"),
    }
