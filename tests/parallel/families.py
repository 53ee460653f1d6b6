"""Small random models of every family, written by transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from megagent.parallel import models

VOCAB = 90  # at least, of every model: tokens are drawn below it
FAMILIES = tuple(family.name for family in models.FAMILIES)
MIXTURES = ("qwen3_moe", "mixtral")


def draw_config(family: str, seed: int, **changes: Any) -> Any:
    """A transformers config of a few layers, that tp=4, ep=2 and four pipeline chunks can split.

    changes: settings that are not left to the draw.
    """
    import transformers

    draw = random.Random(f"{family} {seed}")
    settings: dict[str, Any] = {
        "vocab_size": draw.randrange(VOCAB, VOCAB + 20),  # hardly ever a multiple of 8 x tp: padding is tested too
        "hidden_size": draw.choice([24, 32, 40]),
        "intermediate_size": draw.choice([24, 48]),
        "num_hidden_layers": draw.choice([4, 5, 6]),
        "num_attention_heads": draw.choice([4, 8]),
        "num_key_value_heads": draw.choice([2, 4]),  # 2: fewer than tensor ranks at tp=4
        "head_dim": draw.choice([8, 12]),
        "max_position_embeddings": 128,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([500.0, 10000.0])},
        "tie_word_embeddings": draw.choice([True, False]),
        "initializer_range": 0.15,
    }
    mixture = {"num_experts_per_tok": draw.choice([2, 3])}
    match family:
        case "qwen2":
            return transformers.Qwen2Config(**settings | changes)
        case "qwen3":
            return transformers.Qwen3Config(**settings | changes)
        case "llama":
            scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": draw.choice([8.0, 32.0])} | {
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            settings |= {"rope_parameters": scaling, "max_position_embeddings": 16384, "head_dim": 16}
            settings["attention_bias"] = settings["mlp_bias"] = draw.choice([True, False])
            return transformers.LlamaConfig(**settings | changes)
        case "mistral":
            return transformers.MistralConfig(**settings | changes, sliding_window=None)
        case "qwen3_moe":
            mixture |= {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": draw.choice([True, False])}
            return transformers.Qwen3MoeConfig(**settings | mixture | changes)
        case "mixtral":
            return transformers.MixtralConfig(**settings | mixture | changes, num_local_experts=4, sliding_window=None)
    raise ValueError(f"there is no draw of {family} configs; add a case")


def write_model(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A model whose biases and norms are not the trivial ones. Returns the folder. changes: as for draw_config."""
    save_model(draw_config(family, seed, **changes), folder, seed)
    return folder


def save_model(config: Any, folder: Path, seed: int = 0) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder. Fails if transformers finds a tensor missing, unexpected or misshapen in it."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    faults = {kind: names for kind, names in found.items() if names}
    assert not faults, f"{folder}: {faults}"
    return model
