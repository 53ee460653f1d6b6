"""The starting point of the tiny demo: a tokenizer of the embedded shop's language and an untrained Qwen2-style model.

Both are written as an ordinary Hugging Face folder, so everything after this file (training, rollout, export) treats
the tiny model like any other. `megagent sft` warm-starts it; the result ships as megagent/assets/webshop_tiny.

The tokenizer is a byte-level BPE in the form of Qwen2's own (transformers gives every model of type qwen2 its splitting
rule and normalisation, whatever tokenizer.json says), with whole words as pieces. Two additions make copying easy for
a model of half a million parameters: tags, buttons, product ids and numbers are single tokens, and the opening of an
action and the page separator are too, so that `red` is the same token in ` [SEP] click[red] [SEP] ` and in
`<action>click[red]</action>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

PAD, END = "<|endoftext|>", "<|im_end|>"  # as Qwen2's chat models use them
WHOLE = (
    "<think>",
    "</think>",
    "<action>",
    "</action>",
    " [SEP] ",
    "search[",
    "click[",
    "click[back to search]",
    "click[next >]",
    "click[< prev]",
    "click[description]",
    "click[features]",
    "click[reviews]",
    "click[buy now]",
    "search[<your query>]",
)
# Product ids, prices and other numbers, which Qwen2's rule would split into digits.
_NUMBERED = re.compile(r"[a-z][0-9]{3,}| ?\$?[0-9]+(?:\.[0-9]+)?")
_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CUT = re.compile("|".join(re.escape(token) for token in sorted(WHOLE, key=len, reverse=True)))

VOCABULARY = 768

# Dimensions that tensor parallelism of 2 divides everywhere, and 4 everywhere but in the key/value heads.
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 128, 384, 3, 4, 2
# 0.02, usual for large models, leaves one of this width stuck at chance.
INITIALIZER_RANGE = 0.08
CONFIG: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": INITIALIZER_RANGE,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def train_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE with at most `vocabulary` entries, learnt from `texts`; the same texts give the same tokenizer.

    Ids 0 and 1 are the padding and the end-of-reply tokens; whole tokens (`WHOLE`, and every id and number in the
    texts) come last. Raises ValueError if those alone do not fit.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rests = [_CUT.sub("\0", text) for text in texts]
    numbered = sorted({match for rest in rests for match in _NUMBERED.findall(rest)})
    learnt = vocabulary - len(WHOLE) - len(numbered)
    if learnt < len(alphabet) + 2:
        raise ValueError(f"{len(numbered)} ids and numbers leave no room for words in {vocabulary} entries")
    trainer = trainers.BpeTrainer(
        vocab_size=learnt, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    # What whole tokens take out of a text must not teach merges either.
    words = (piece for rest in rests for piece in _NUMBERED.sub("\0", rest).split("\0") if piece)
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in (*WHOLE, *numbered)])
    return tokenizer


def fresh_weights(seed: int) -> dict[str, Tensor]:
    """Untrained parameters by Hugging Face name, fp32: normal with `initializer_range`, biases 0, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    kv_width = HIDDEN // HEADS * KV_HEADS

    def normal(*shape: int) -> Tensor:
        return torch.empty(*shape).normal_(0.0, INITIALIZER_RANGE, generator=generator)

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        for name, width in (("q", HIDDEN), ("k", kv_width), ("v", kv_width)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = normal(width, HIDDEN)
            weights[f"{prefix}.self_attn.{name}_proj.bias"] = torch.zeros(width)
        weights[f"{prefix}.self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}.mlp.gate_proj.weight"] = normal(INNER, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = normal(INNER, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = normal(HIDDEN, INNER)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    return weights


def write_model(folder: Path, tokenizer: Tokenizer, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes a Hugging Face folder: config.json, generation_config.json, tokenizer files, model.safetensors.

    weights: Hugging Face name -> tensor, stored as `dtype`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "torch_dtype": str(dtype).removeprefix("torch.")}
    generation = {"do_sample": True, "temperature": 1.0, "pad_token_id": 0, "eos_token_id": 1}
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": PAD,
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
        ("special_tokens_map.json", {"pad_token": PAD, "eos_token": END, "unk_token": PAD}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
