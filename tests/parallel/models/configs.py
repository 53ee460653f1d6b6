"""config.json of published models, their numbers typed in, and tiny ones of every family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megagent.parallel.models import Architecture, architecture_of

_QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
_LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
_LLAMA_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp", "rope_scaling")
_QWEN3_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
# Name on the hub -> config.json.
REAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen/Qwen2.5-1.5B": {
            **_QWEN25_7B,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "Qwen/Qwen2.5-7B": _QWEN25_7B,
        "Qwen/Qwen2.5-72B": {
            **_QWEN25_7B,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "max_window_layers": 80,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
        },
        "meta-llama/Llama-3.1-8B": _LLAMA31_8B,
        "meta-llama/Llama-3.1-70B": {
            **_LLAMA31_8B,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
        },
        "mistralai/Mistral-7B-v0.3": {
            **{key: value for key, value in _LLAMA31_8B.items() if key not in _LLAMA_ONLY},
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 32768,
        },
        "Qwen/Qwen3-32B": _QWEN3_32B,
        "Qwen/Qwen3-235B-A22B": {
            **_QWEN3_32B,
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 94,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
        "mistralai/Mixtral-8x7B-v0.1": _MIXTRAL_8X7B,
    }
)
# As the hub counts the elements of their safetensors files.
PARAMETERS: Mapping[str, int] = MappingProxyType(
    {
        "Qwen/Qwen2.5-1.5B": 1_543_714_304,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
        "Qwen/Qwen2.5-72B": 72_706_203_648,
        "meta-llama/Llama-3.1-8B": 8_030_261_248,
        "meta-llama/Llama-3.1-70B": 70_553_706_496,
        "mistralai/Mistral-7B-v0.3": 7_248_023_552,
        "Qwen/Qwen3-32B": 32_762_123_264,
        "Qwen/Qwen3-235B-A22B": 235_093_634_560,
        "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    }
)

_TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "vocab_size": 50,  # pads at every tp
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# Family -> config.json of a model of a few hundred elements.
TINY: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2": {**_TINY, "architectures": ["Qwen2ForCausalLM"]},
        "qwen3": {**_TINY, "architectures": ["Qwen3ForCausalLM"], "head_dim": 6},
        "llama": {**_TINY, "architectures": ["LlamaForCausalLM"], "rope_scaling": _LLAMA31_8B["rope_scaling"]},
        "mistral": {**_TINY, "architectures": ["MistralForCausalLM"], "sliding_window": None},
        "qwen3_moe": {
            **_TINY,
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": 6,
            "moe_intermediate_size": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        "mixtral": {
            **_TINY,
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    }
)


def tiny(family: str, **changes: Any) -> Architecture:
    """The tiny model of a family, with some keys of its config changed."""
    return architecture_of({**TINY[family], **changes})
