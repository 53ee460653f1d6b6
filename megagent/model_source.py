"""Where model.path leads: a built-in model, a Hugging Face folder, or a hub id with its cache.

A configuration is checked against the model's config.json alone. For the models that experiments use, what the check
needs is also written down here, so that a plan can be made where there is neither the model nor a network.
"""

from __future__ import annotations

import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megagent.errors import MegagentError
from megagent.paths import expanded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(__file__).resolve().parent / "assets"
BUILTIN = "builtin:"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def _qwen25(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool) -> Mapping[str, Any]:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": 151936 if tied else 152064,
        "max_position_embeddings": 32768,  # of the Instruct models; some base models have more
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    return MappingProxyType(config)


_QWEN25 = {
    "0.5B": _qwen25(24, 896, 14, 2, 4864, tied=True),
    "1.5B": _qwen25(28, 1536, 12, 2, 8960, tied=True),
    "3B": _qwen25(36, 2048, 16, 2, 11008, tied=True),
    "7B": _qwen25(28, 3584, 28, 4, 18944, tied=False),
    "14B": _qwen25(48, 5120, 40, 8, 13824, tied=False),
    "32B": _qwen25(64, 5120, 40, 8, 27648, tied=False),
    "72B": _qwen25(80, 8192, 64, 8, 29568, tied=False),
}
# Hub id -> the part of its config.json that decides how it can be split.
KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {f"Qwen/Qwen2.5-{size}{kind}": config for size, config in _QWEN25.items() for kind in ("", "-Instruct")}
)


def local_folder(path: str) -> Path | None:
    """The folder that model.path names, or None if it is a hub id.

    `builtin:name` is a folder of megagent/assets; what exists, or can only be a file path, is a folder.
    Raises MegagentError (a sentence without model.path) if it begins with the home folder of nobody.
    """
    if path.startswith(BUILTIN):
        return ASSETS / path.removeprefix(BUILTIN)
    folder = expanded(path)
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return None if is_hub_id and not folder.exists() else folder


def hf_config_of(path: str, *, fetch: bool = False) -> Mapping[str, Any]:
    """config.json of model.path; of a known hub model that is not in the cache, the part of it that is in KNOWN.

    fetch: have the file itself, because the model is about to be used.
    Raises MegagentError (a sentence without model.path) if there is no such model.
    """
    folder = local_folder(path)
    if folder is not None:
        return _read(_config_file(path, folder))
    if find_spec("huggingface_hub") is None:  # comes with the extras, and a bare install can still plan
        if path in KNOWN and not fetch:
            return KNOWN[path]
        raise MegagentError(_refusal(path, "huggingface_hub is not installed"))
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return _read(Path(cached))
    if path in KNOWN and not fetch:
        return KNOWN[path]
    return _read(_fetch(path))


def model_folder(path: str) -> Path:
    """The folder with the weights and tokenizer of model.path; a hub model is downloaded into the Hugging Face cache.

    Raises MegagentError if there is no such model.
    """
    try:
        folder = local_folder(path)
        if folder is not None:
            _config_file(path, folder)
            return folder
        return _download(path)
    except MegagentError as error:
        raise MegagentError(f"model.path={path}: {error}") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of model.path. Raises MegagentError if the folder has none or it cannot be read.

    transformers makes an empty tokenizer of a folder without tokenizer files, which encodes every text to nothing.
    """
    from transformers import AutoTokenizer

    folder = model_folder(path)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise MegagentError(
            f"model.path={path}: {folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's there"
        )
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise MegagentError(
            f"model.path={path}: its tokenizer cannot be read ({error}); download or export the model again"
        ) from error


def _config_file(path: str, folder: Path) -> Path:
    file = folder / "config.json"
    if file.is_file():
        return file
    if path.startswith(BUILTIN):
        names = sorted(BUILTIN + each.parent.name for each in ASSETS.glob("*/config.json"))
        raise MegagentError(f"there is no such built-in model; built in: {', '.join(names) or 'none'}")
    what = "the folder has no config.json" if folder.is_dir() else "there is no such folder"
    raise MegagentError(f"{what}; give a Hugging Face model folder, a hub id (owner/name) or builtin:webshop_tiny")


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MegagentError(f"{file} cannot be read ({error}); export or download the model again") from error
    if not isinstance(content, dict):
        raise MegagentError(f"{file} holds no JSON object; export or download the model again")
    return content


def _fetch(path: str) -> Path:
    from huggingface_hub import hf_hub_download

    _refuse_without_network(path)
    try:
        return Path(hf_hub_download(path, "config.json", etag_timeout=5))
    except Exception as error:  # the hub client's errors have no common base: network, access, name, disk
        raise MegagentError(_refusal(path, type(error).__name__)) from error


def _download(path: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    files = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(path, allow_patterns=files))
    except LocalEntryNotFoundError as error:  # neither in the cache nor reachable
        raise MegagentError(_refusal(path, "no connection")) from error
    except Exception as error:  # as in _fetch
        raise MegagentError(_refusal(path, type(error).__name__)) from error


def _refuse_without_network(path: str) -> None:
    """The hub client retries a host that does not resolve for half a minute; this knows at once."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        raise MegagentError(_refusal(path, "HF_HUB_OFFLINE is set"))
    if urllib.request.getproxies():
        return  # the proxy resolves names
    host = urllib.parse.urlsplit(ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise MegagentError(_refusal(path, f"{host} cannot be reached")) from error


def _refusal(path: str, reason: str) -> str:
    return (
        f"not in the Hugging Face cache, and the hub did not give it ({reason}); download it where there is a network "
        f"(hf download {path}), or give a local folder"
    )
