"""The starting point of the tiny demo: a tokenizer of the embedded shop's language and an untrained Qwen2-style model.

Both are written as an ordinary Hugging Face folder, so everything after this file (training, rollout, export) treats
the tiny model like any other. `megagent sft` warm-starts it; the result ships as megagent/assets/webshop_tiny.

The tokenizer is a byte-level BPE whose pieces are whole words, ids and prices. Two rules make copying easy for a model
of half a million parameters: buttons and tags are single tokens, and the page separator carries its own spaces, so
that `red` is the same token in ` [SEP] click[red] [SEP] ` and in `<action>click[red]</action>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END = "<|end|>"
PAD = "<|pad|>"
SPECIAL = (PAD, END)
WHOLE = (
    "<think>",
    "</think>",
    "<action>",
    "</action>",
    " [SEP] ",
    "click[back to search]",
    "click[next >]",
    "click[< prev]",
    "click[description]",
    "click[features]",
    "click[reviews]",
    "click[buy now]",
    "search[<your query>]",
)
# Verbs of actions, words and ids, numbers and prices, then any other single character.
_PIECES = r"click\[|search\[| ?[A-Za-z][A-Za-z0-9]*| ?\$?[0-9]+(?:\.[0-9]+)?|."

VOCABULARY = 768

# Dimensions that tensor parallelism of 2 divides everywhere, and 4 everywhere but in the key/value heads.
CONFIG: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    # 0.02, usual for large models, leaves one of this width stuck at chance.
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE with at most `vocabulary` entries, learnt from `texts`; the same texts give the same tokenizer.

    Ids 0 and 1 are the padding and the end-of-reply tokens; the tags and buttons of `WHOLE` come last.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    learnt = vocabulary - len(WHOLE)
    trainer = trainers.BpeTrainer(
        vocab_size=learnt,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # What the added tokens will take out of a text must not teach merges either.
    tokenizer.train_from_iterable((piece for text in texts for piece in _without_whole(text)), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in WHOLE])
    return tokenizer


def _without_whole(text: str) -> list[str]:
    for token in WHOLE:
        text = text.replace(token, "\0")
    return [piece for piece in text.split("\0") if piece]


def fresh_weights(seed: int) -> dict[str, Tensor]:
    """Untrained parameters by Hugging Face name, fp32: normal with `initializer_range`, biases 0, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, layers = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_hidden_layers"]
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    assert isinstance(hidden, int) and isinstance(inner, int) and isinstance(layers, int)
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    kv_width = hidden // heads * kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.empty(*shape).normal_(0.0, float(str(CONFIG["initializer_range"])), generator=generator)

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(hidden)
        for name, width in (("q", hidden), ("k", kv_width), ("v", kv_width)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = normal(width, hidden)
            weights[f"{prefix}.self_attn.{name}_proj.bias"] = torch.zeros(width)
        weights[f"{prefix}.self_attn.o_proj.weight"] = normal(hidden, hidden)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(hidden)
        weights[f"{prefix}.mlp.gate_proj.weight"] = normal(inner, hidden)
        weights[f"{prefix}.mlp.up_proj.weight"] = normal(inner, hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = normal(hidden, inner)
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


def write_model(folder: Path, tokenizer: Tokenizer, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes a Hugging Face folder: config.json, generation_config.json, tokenizer files, model.safetensors.

    weights: Hugging Face name -> tensor, stored as `dtype`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "torch_dtype": str(dtype).removeprefix("torch.")}
    generation = {"do_sample": True, "temperature": 1.0, "pad_token_id": 0, "eos_token_id": 1}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
        ("special_tokens_map.json", {"pad_token": PAD, "eos_token": END}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
