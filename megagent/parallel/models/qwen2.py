"""The Qwen2 family (Qwen2, Qwen2.5; dense): grouped-query attention, biases on q, k and v only, SwiGLU, RMSNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagent.parallel.models.family import Columns, Family, Qkv, Replicated, Rows, Sizes, Stacked, Tie


def _sizes(hf_config: Mapping[str, Any]) -> Sizes:
    heads = int(hf_config["num_attention_heads"])
    return Sizes(
        layers=int(hf_config["num_hidden_layers"]),
        vocab=int(hf_config["vocab_size"]),
        hidden=int(hf_config["hidden_size"]),
        ffn=int(hf_config["intermediate_size"]),
        heads=heads,
        kv_heads=int(hf_config.get("num_key_value_heads") or heads),
        head_dim=int(hf_config.get("head_dim") or hf_config["hidden_size"] // heads),
    )


def _rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from either spelling: rope_theta and rope_scaling, or rope_parameters (transformers 5)."""
    return {
        "rope_theta": hf_config.get("rope_theta", 10000.0),
        **(hf_config.get("rope_scaling") or {}),
        **(hf_config.get("rope_parameters") or {}),
    }


def _rotary_base(hf_config: Mapping[str, Any]) -> float:
    return float(_rope(hf_config)["rope_theta"])


_REQUIRED = (
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)


def _problems(hf_config: Mapping[str, Any]) -> list[str]:
    missing = [name for name in _REQUIRED if hf_config.get(name) is None]
    if missing:
        return [f"{name} is missing; take the config.json that belongs to the weights" for name in missing]
    sizes = _sizes(hf_config)
    found = []
    if sizes.heads % sizes.kv_heads:
        found.append(
            f"num_key_value_heads={sizes.kv_heads} does not divide num_attention_heads={sizes.heads}; "
            "take the config.json that belongs to the weights"
        )
    if not hf_config.get("head_dim") and sizes.hidden % sizes.heads:
        found.append(
            f"num_attention_heads={sizes.heads} does not divide hidden_size={sizes.hidden}; set head_dim if so meant"
        )
    if hf_config.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act={hf_config['hidden_act']}: only silu is supported; choose another model")
    if hf_config.get("use_sliding_window") or any(
        kind != "full_attention" for kind in hf_config.get("layer_types") or ()
    ):
        found.append("sliding-window attention is not supported; set use_sliding_window=false or choose another model")
    rope = _rope(hf_config)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        found.append(f"rope type {rope_type} is not supported; remove rope_scaling for the model's original context")
    return found


def _transformer_kwargs(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    from torch.nn import functional  # only here: everything else about a family is integers and names

    return {
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(hf_config["rms_norm_eps"]),
        "init_method_std": float(hf_config.get("initializer_range", 0.02)),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_HF_LAYER}.self_attn"

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    tensors=(
        Rows(
            "embedding.word_embeddings.weight",
            at="first",
            of="model.embed_tokens.weight",
            shape=("vocab", "hidden"),
            pads="vocab",
        ),
        # Two names: of the local layer spec, and of Transformer Engine's, which fuses the norm into the layer after it.
        Replicated(
            (f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight"),
            of=f"{_HF_LAYER}.input_layernorm.weight",
            shape=("hidden",),
        ),
        Qkv(
            f"{_LAYER}.self_attention.linear_qkv.weight",
            q=f"{_ATTENTION}.q_proj.weight",
            k=f"{_ATTENTION}.k_proj.weight",
            v=f"{_ATTENTION}.v_proj.weight",
            rest=("hidden",),
        ),
        Qkv(
            f"{_LAYER}.self_attention.linear_qkv.bias",
            q=f"{_ATTENTION}.q_proj.bias",
            k=f"{_ATTENTION}.k_proj.bias",
            v=f"{_ATTENTION}.v_proj.bias",
        ),
        Columns(
            f"{_LAYER}.self_attention.linear_proj.weight",
            of=f"{_ATTENTION}.o_proj.weight",
            shape=("hidden", "query"),
        ),
        Replicated(
            (f"{_LAYER}.pre_mlp_layernorm.weight", f"{_LAYER}.mlp.linear_fc1.layer_norm_weight"),
            of=f"{_HF_LAYER}.post_attention_layernorm.weight",
            shape=("hidden",),
        ),
        Stacked(
            f"{_LAYER}.mlp.linear_fc1.weight",
            of=(f"{_HF_LAYER}.mlp.gate_proj.weight", f"{_HF_LAYER}.mlp.up_proj.weight"),
            shape=("ffn", "hidden"),
        ),
        Columns(f"{_LAYER}.mlp.linear_fc2.weight", of=f"{_HF_LAYER}.mlp.down_proj.weight", shape=("hidden", "ffn")),
        Replicated("decoder.final_layernorm.weight", at="last", of="model.norm.weight", shape=("hidden",)),
        Rows("output_layer.weight", at="last", of="lm_head.weight", shape=("vocab", "hidden"), pads="vocab"),
    ),
    ties=Tie("output_layer.weight", to="embedding.word_embeddings.weight", when="tie_word_embeddings"),
    read_sizes=_sizes,
    config_problems=_problems,
    read_transformer_kwargs=_transformer_kwargs,
    read_rotary_base=_rotary_base,
)
