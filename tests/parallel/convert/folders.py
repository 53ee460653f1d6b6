"""Tiny Hugging Face folders of every family, written by the safetensors library, and what is in them."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from megagent.parallel.convert.conversion import Options
from tests.parallel.models.configs import TINY, tiny

QUIET = Options(quiet=True)


def random_weights(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = tiny(family, **changes).hf_shapes()
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_folder(
    folder: Path, family: str, weights: Mapping[str, Tensor] | None = None, files: int = 1, **changes: Any
) -> Path:
    """A model's folder with a config, a tokenizer and its weights in some files. changes: of the config."""
    weights = random_weights(family, **changes) if weights is None else weights
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TINY[family], **changes}))
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    if files == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return folder
    names = list(weights)
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: weights[name] for name in names[number::files]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))


def read_folder(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether these are the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def edit(checkpoint: Path, change: Callable[[dcp.Metadata], object]) -> None:
    """Change what a distributed checkpoint says of itself."""
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Harmful:
    """Pickled, it makes a folder wherever it is unpickled with everything allowed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def plant(checkpoint: Path, harm: Path) -> None:
    """Layers' own states, which are no tensors, become something that makes `harm` where it is unpickled carelessly."""
    state = io.BytesIO()
    torch.save([Harmful(harm)], state)

    def change(metadata: dcp.Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.offset is None:
                (checkpoint / info.relative_path).write_bytes(state.getvalue())
                info.offset, info.length = 0, len(state.getvalue())

    edit(checkpoint, change)
