"""The few numbers of a Hugging Face model that decide how it can be split, read without loading it.

They come from the model's config.json: in its folder, in the Hugging Face cache, or fetched. For the models that
megagent ships experiments for they are also written down here, so that a plan can be checked without a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagent.errors import MegagentError

ASSETS = Path(__file__).resolve().parent / "assets"
BUILTIN = "builtin:"


@dataclass(frozen=True)
class ModelFacts:
    name: str  # as messages call it
    family: str  # model_type of config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int  # positions
    tied: bool  # output layer shares the embedding

    @classmethod
    def of(cls, name: str, hf_config: Mapping[str, Any]) -> ModelFacts:
        """Raises MegagentError naming the keys that config.json lacks."""
        keys = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        missing = [key for key in keys if key not in hf_config]
        if missing:
            raise MegagentError(f"config.json of {name} lacks {', '.join(missing)}; use a text-generation model")
        return cls(
            name=name,
            family=str(hf_config["model_type"]),
            layers=int(hf_config["num_hidden_layers"]),
            hidden=int(hf_config["hidden_size"]),
            heads=int(hf_config["num_attention_heads"]),
            kv_heads=int(hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"]),
            ffn=int(hf_config["intermediate_size"]),
            vocab=int(hf_config["vocab_size"]),
            context=int(hf_config.get("max_position_embeddings", 0)),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
        )


def _qwen25(size: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool) -> ModelFacts:
    return ModelFacts(f"Qwen2.5-{size}", "qwen2", layers, hidden, heads, kv_heads, ffn, vocab, 32768, tied)


_QWEN25 = (
    _qwen25("0.5B", 24, 896, 14, 2, 4864, 151936, tied=True),
    _qwen25("1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True),
    _qwen25("3B", 36, 2048, 16, 2, 11008, 151936, tied=True),
    _qwen25("7B", 28, 3584, 28, 4, 18944, 152064, tied=False),
    _qwen25("14B", 48, 5120, 40, 8, 13824, 152064, tied=False),
    _qwen25("32B", 64, 5120, 40, 8, 27648, 152064, tied=False),
    _qwen25("72B", 80, 8192, 64, 8, 29568, 152064, tied=False),
)
KNOWN = {f"Qwen/{facts.name}{suffix}": facts for facts in _QWEN25 for suffix in ("", "-Instruct")}


def local_folder(path: str) -> Path | None:
    """The folder that model.path names, or None if it is a hub id.

    `builtin:name` is a folder of megagent/assets; anything that exists, or that can only be a file path, is a folder.
    """
    if path.startswith(BUILTIN):
        return ASSETS / path.removeprefix(BUILTIN)
    folder = Path(path).expanduser()
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return None if is_hub_id and not folder.exists() else folder


def model_facts(path: str, *, fetch: bool = False) -> ModelFacts:
    """The facts of model.path.

    fetch: a hub model must be in the cache or be fetched now, because it is about to be used; otherwise the written
    facts of a known model are enough and nothing is fetched for it.
    Raises MegagentError if there is no such model.
    """
    folder = local_folder(path)
    if folder is not None:
        return _from_folder(path, folder)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return _from_file(path, Path(cached))
    if path in KNOWN and not fetch:
        return KNOWN[path]
    return _from_hub(path)


def _from_folder(path: str, folder: Path) -> ModelFacts:
    if folder.is_dir() and (folder / "config.json").is_file():
        return _from_file(path, folder / "config.json")
    if path.startswith(BUILTIN):
        names = sorted(each.parent.name for each in ASSETS.glob("*/config.json"))
        raise MegagentError(f"no such built-in model; there is {', '.join(BUILTIN + name for name in names) or 'none'}")
    what = "the folder has no config.json" if folder.is_dir() else "there is no such folder"
    raise MegagentError(f"{what}; give a Hugging Face model folder, a hub id (owner/name) or builtin:webshop_tiny")


def _from_file(path: str, file: Path) -> ModelFacts:
    try:
        hf_config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MegagentError(f"{file} cannot be read ({error}); export or download the model again") from error
    if not isinstance(hf_config, dict):
        raise MegagentError(f"{file} holds no JSON object; export or download the model again")
    return ModelFacts.of(Path(path.removeprefix(BUILTIN)).name, hf_config)


def _from_hub(path: str) -> ModelFacts:
    from huggingface_hub import hf_hub_download

    advice = "download it where there is a network (hf download " + path + "), or give a local folder"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}:
        raise MegagentError(f"not in the Hugging Face cache, and HF_HUB_OFFLINE is set; {advice}")
    try:
        file = hf_hub_download(path, "config.json", etag_timeout=5)
    except Exception as error:  # the hub client's errors have no common base: network, access, name, disk
        reason = type(error).__name__
        raise MegagentError(f"not in the Hugging Face cache, and the hub did not give it ({reason}); {advice}") from error
    return _from_file(path, Path(file))
