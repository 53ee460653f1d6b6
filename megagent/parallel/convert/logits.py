"""Logits of a checkpoint, by transformers or by Megatron itself: the last word on whether a conversion is right."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megagent.errors import MegagentError
from megagent.parallel.convert.stored import Stored
from megagent.parallel.unpickling import weights_only

TOLERANCE = 1e-5  # of the largest logit, in fp32
ROUNDED = 0.1  # the same, where the weights of one side are those of the other, rounded
LARGEST = 2_000_000_000  # parameters that fit where somebody just wants to know
_ROWS, _TOKENS = 2, 48


def largest_difference(one: Stored, other: Stored) -> float:
    """How far the logits of two checkpoints are apart, relative to the largest, both in fp32 on the CPU.

    Hugging Face folders are run by transformers, Megatron checkpoints are loaded and run by Megatron.
    Raises MegagentError if the models are too large for that.
    """
    if one.parameters > LARGEST:
        raise MegagentError(
            f"{one.folder} has {one.parameters:,} parameters, and logits are compared up to {LARGEST:,}; leave "
            "--logits out: the tensors have been compared"
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, one.architecture.vocab, (_ROWS, _TOKENS), generator=generator)
    expected, got = (_logits(stored, tokens) for stored in (one, other))
    return float((expected - got).abs().max() / expected.abs().max())


def _logits(stored: Stored, tokens: Tensor) -> Tensor:
    """[rows, tokens, vocabulary] float32."""
    return _by_transformers(stored.folder, tokens) if stored.kind == "Hugging Face" else _by_megatron(stored, tokens)


@torch.no_grad()
def _by_transformers(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    with _loading(folder, "transformers"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model(tokens).logits.float()


@torch.no_grad()
def _by_megatron(stored: Stored, tokens: Tensor) -> Tensor:
    from megagent.parallel import platform

    platform.install("cpu", threads=torch.get_num_threads())
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    from megagent.parallel import model
    from megagent.parallel.degrees import Degrees

    alone = Degrees()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
            transformer = model.transformer_config(stored.architecture, alone, torch.float32)
            (chunk,) = model.build_chunks(transformer, stored.architecture, alone, alone.place(0))
            chunk.eval()
            state = {"model": chunk.sharded_state_dict(metadata={"singleton_local_shards": False})}
            with _loading(stored.folder, "Megatron"):
                chunk.load_state_dict(dist_checkpointing.load(state, str(stored.folder))["model"])
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            logits = chunk(tokens, positions, None)  # [rows, tokens, padded vocabulary]
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return logits[..., : stored.architecture.vocab].float()


@contextmanager
def _loading(folder: Path, by: str) -> Iterator[None]:
    """Somebody else's loader at a checkpoint that may be anyone's."""
    try:
        with weights_only(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what Megatron calls in torch
            yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        reason = str(next((failure[0] for failure in failures), error)).strip() or type(error).__name__
        if "weights_only" in reason:  # which goes on to say how to run what is in there
            reason = "it holds more than tensors and plain values"
        raise MegagentError(
            f"{by} cannot load {folder} ({reason.splitlines()[0][:200]}); take another copy, or leave --logits out: "
            "the tensors have been compared"
        ) from error
