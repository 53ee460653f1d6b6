"""The vLLM end of the gather path, backend `megagent_file`: slow, plain, and what the other is compared with.

The trainer writes one safetensors file with whole Hugging Face tensors, and every vLLM worker maps it and copies the
share that it owns through vLLM's layerwise reload.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megagent.errors import MegagentError
from megagent.parallel.reshard.apply import forget_packed_experts, repack

TIED_HEAD = "lm_head.weight"
NAMES_SHOWN = 20  # names that an error lists of each kind of fault


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the path comes with each update."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """path: safetensors file with every tensor of the model, by Hugging Face name; version: number of these weights."""

    path: str
    version: int


class FileReceiver(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads a file of whole Hugging Face tensors into this worker's share of the model.

    The file has to hold exactly the tensors of the model's own checkpoint; nothing is touched before that is known.
    On CUDA the layerwise reload copies into the tensors in place, so captured graphs stay valid; on CPU it packs the
    linear weights anew.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    version: int | None = None  # of the weights that were received last, None for those of the checkpoint
    _received: int | None = None

    @cached_property
    def _expected(self) -> dict[str, tuple[int, ...]]:
        return checkpoint_shapes(Path(self.model_config.model))

    @cached_property
    def _optional(self) -> frozenset[str]:
        tied = getattr(self.model_config.hf_config.get_text_config(), "tie_word_embeddings", False)
        return frozenset({TIED_HEAD}) if tied else frozenset()

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        del init_info
        _ = self._expected  # a model folder that cannot be read should fail at the start, not at the first sync

    def check(self, path: str, version: int) -> str | None:
        """None if the file holds the model's whole checkpoint in this version, else every fault in one text."""
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                label = (file.metadata() or {}).get("version")
        except Exception as error:  # safetensors raises its own error type, OSError, and plain ValueError
            return f"the weights file {path} cannot be read ({error}); write it completely, then rename it into place."
        if label is not None and label != str(version):
            return (
                f"the weights file {path} holds version {label}, not version {version}; "
                "pass the version that the trainer wrote."
            )
        return compare_tensors(path, self._expected, found, self._optional)

    def start_weight_update(self) -> None:
        self._received = None  # the layers are only opened once the file has been checked

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes the accelerator here, which raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        problem = self.check(update_info.path, update_info.version)
        if problem is not None:
            raise MegagentError(problem)
        if self.device.type == "cpu":
            for layer in self.model.modules():
                forget_packed_experts(layer)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(update_info.path, skip=self._optional))
        self._received = update_info.version

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._received is None:
            raise MegagentError("no weights came between the start and the end of a weight update.")
        with _quiet_reload():
            finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)
        self.version, self._received = self._received, None

    def shutdown(self) -> None:
        self._received = None


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Packs the output layers anew whose weight belongs to the embedding.

    vLLM's layerwise reload processes only layers that a tensor of the file was loaded into. A tied lm_head is none, so
    on CPU it would keep the matrix that was packed from the old embedding, and the logits would silently be wrong.
    Where nothing is packed (CUDA), this does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    for head in embeddings:
        tied = any(other is not head and other.weight is head.weight for other in embeddings)
        if isinstance(head, ParallelLMHead) and tied:
            repack(head)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Hugging Face folder, from the headers of its safetensors files.

    Raises MegagentError if the folder holds none.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MegagentError(f"{folder} holds no safetensors file; the rollout engine needs a Hugging Face folder.")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def compare_tensors(
    path: str,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> str | None:
    """None if both hold the same names with the same shapes, else one text with all names that differ.

    optional: names that may be absent on either side (a tied output layer).
    """
    optional = set(optional)
    missing = sorted(expected.keys() - found.keys() - optional)
    unexpected = sorted(found.keys() - expected.keys() - optional)
    misshapen = sorted(
        f"{name} {list(found[name])} instead of {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    )
    faults = [
        f"  {kind} ({len(names)}): {_listed(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if not faults:
        return None
    head = f"the weights file {path} does not fit the engine's model; export every tensor under its Hugging Face name."
    return "\n".join([head, *faults])


def _listed(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def _tensors(path: str, skip: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, mapped and not read, sorted so that those of one layer follow each other."""
    with safe_open(path, framework="pt") as file:
        for name in sorted(set(file.keys()) - set(skip)):
            yield name, file.get_tensor(name)


@contextmanager
def _quiet_reload() -> Iterator[None]:
    # vLLM warns "Failed to load weights" for each layer without tensors of its own: rotary embeddings and tied heads.
    # The set has been checked by name, so there is nothing to warn of.
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
