"""The building blocks that the families' tables are made of: what a decoder with one kind of layer consists of."""

from __future__ import annotations

from megagent.parallel.models.rows import Columns, Qkv, Replicated, Row, Rows, Stacked, Tie

_LAYER = "decoder.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attention"
_EXPERTS = f"{_LAYER}.mlp.experts"
_HF_LAYER = "model.layers.{layer}"
_HF_ATTENTION = f"{_HF_LAYER}.self_attn"

TIE = Tie("output_layer.weight", to="embedding.word_embeddings.weight")


def dense_decoder() -> tuple[Row, ...]:
    """Grouped-query attention and a gated MLP in every layer."""
    mlp, hf_mlp = f"{_LAYER}.mlp", f"{_HF_LAYER}.mlp"
    return (
        *_embedding(),
        *_attention(),
        # Two names: of the local layer spec, and of Transformer Engine's, which fuses the norm into the layer after it.
        Replicated(
            (f"{_LAYER}.pre_mlp_layernorm.weight", f"{mlp}.linear_fc1.layer_norm_weight"),
            of=f"{_HF_LAYER}.post_attention_layernorm.weight",
            shape=("hidden",),
        ),
        Stacked(
            f"{mlp}.linear_fc1.weight",
            of=(f"{hf_mlp}.gate_proj.weight", f"{hf_mlp}.up_proj.weight"),
            shape=("ffn", "hidden"),
        ),
        Stacked(
            f"{mlp}.linear_fc1.bias",
            when="linear_bias",
            of=(f"{hf_mlp}.gate_proj.bias", f"{hf_mlp}.up_proj.bias"),
            shape=("ffn",),
        ),
        Columns(f"{mlp}.linear_fc2.weight", of=f"{hf_mlp}.down_proj.weight", shape=("hidden", "ffn")),
        Replicated(f"{mlp}.linear_fc2.bias", when="linear_bias", of=f"{hf_mlp}.down_proj.bias", shape=("hidden",)),
        *_output(),
    )


def mixture_decoder(mlp: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Grouped-query attention, a router and gated experts in every layer.

    mlp, gate, up, down: what Hugging Face calls the layer's mixture and the three matrices of an expert in it.
    """
    hf_mlp = f"{_HF_LAYER}.{mlp}"
    hf_expert = f"{hf_mlp}.experts.{{expert}}"
    # Two names: of a list of MLPs, and of Transformer Engine's grouped layer. In both an expert is one tensor.
    fc1, fc2 = (
        (f"{_EXPERTS}.local_experts.{{expert}}.{layer}.weight", f"{_EXPERTS}.{layer}.weight{{expert}}")
        for layer in ("linear_fc1", "linear_fc2")
    )
    return (
        *_embedding(),
        *_attention(),
        Replicated(
            f"{_LAYER}.pre_mlp_layernorm.weight",
            of=f"{_HF_LAYER}.post_attention_layernorm.weight",
            shape=("hidden",),
        ),
        Replicated(f"{_LAYER}.mlp.router.weight", of=f"{hf_mlp}.gate.weight", shape=("expert_count", "hidden")),
        Stacked(fc1, of=(f"{hf_expert}.{gate}.weight", f"{hf_expert}.{up}.weight"), shape=("expert_ffn", "hidden")),
        Columns(fc2, of=f"{hf_expert}.{down}.weight", shape=("hidden", "expert_ffn")),
        *_output(),
    )


def _embedding() -> tuple[Row, ...]:
    return (
        Rows(
            "embedding.word_embeddings.weight",
            at="first",
            of="model.embed_tokens.weight",
            shape=("vocab", "hidden"),
            pads="vocab",
        ),
    )


def _attention() -> tuple[Row, ...]:
    qkv = f"{_ATTENTION}.linear_qkv"
    return (
        Replicated(
            (f"{_LAYER}.input_layernorm.weight", f"{qkv}.layer_norm_weight"),
            of=f"{_HF_LAYER}.input_layernorm.weight",
            shape=("hidden",),
        ),
        *(
            Qkv(
                f"{qkv}.{part}",
                when=when,
                q=f"{_HF_ATTENTION}.q_proj.{part}",
                k=f"{_HF_ATTENTION}.k_proj.{part}",
                v=f"{_HF_ATTENTION}.v_proj.{part}",
                rest=rest,
            )
            for part, when, rest in (("weight", None, ("hidden",)), ("bias", "qkv_bias", ()))
        ),
        *(
            Replicated(
                f"{_ATTENTION}.{which}_layernorm.weight",
                when="qk_norm",
                of=f"{_HF_ATTENTION}.{which}_norm.weight",
                shape=("head_dim",),
            )
            for which in ("q", "k")
        ),
        Columns(f"{_ATTENTION}.linear_proj.weight", of=f"{_HF_ATTENTION}.o_proj.weight", shape=("hidden", "query")),
        Replicated(
            f"{_ATTENTION}.linear_proj.bias", when="linear_bias", of=f"{_HF_ATTENTION}.o_proj.bias", shape=("hidden",)
        ),
    )


def _output() -> tuple[Row, ...]:
    return (
        Replicated("decoder.final_layernorm.weight", at="last", of="model.norm.weight", shape=("hidden",)),
        Rows("output_layer.weight", at="last", of="lm_head.weight", shape=("vocab", "hidden"), pads="vocab"),
    )
