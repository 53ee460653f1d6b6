"""Megatron-Core GPT stages from a Hugging Face configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megagent.config import Config
from megagent.errors import ConfigError
from megagent.parallel import models, platform
from megagent.parallel.attention import TorchAttention
from megagent.parallel.topology import Topology

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ConfigError if there is none or it is not JSON."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            [f"model.path={folder}: there is no config.json; give a folder with a Hugging Face model"]
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError([f"model.path={folder}: config.json is not JSON ({error}); restore the file"]) from None


@dataclass(frozen=True)
class Stage:
    """This rank's part of the model.

    chunks: the bare GPTModel stages; wrapped: the same in Megatron's data-parallel wrapper, what the schedule runs;
    vocab: number of real (not padded) vocabulary entries.
    """

    chunks: list[GPTModel]
    wrapped: list[DistributedDataParallel]
    transformer: TransformerConfig
    family: models.Family
    hf_config: dict[str, Any]
    vocab: int

    def parameters(self) -> Iterator[nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def select_positions(self, positions: Tensor) -> None:
        """Compute logits for these positions only in the next forward pass.

        positions: [n] int64, token x rows + row, of the hidden states [tokens, rows, hidden]. The stage's output is
        then [1, n, vocabulary / tp] instead of [rows, tokens, vocabulary / tp]. No effect but on the last stage.
        """
        for chunk in self.chunks:
            if chunk.post_process:
                chunk.output_layer.selected_positions = positions


def build(config: Config, topology: Topology, hf_config: dict[str, Any]) -> Stage:
    """This rank's stages, with uninitialised weights. Collective (the data-parallel wrapper)."""
    family = models.family_of(hf_config)
    transformer = transformer_config(config, family, hf_config)
    chunk = GPTModel(
        config=transformer,
        transformer_layer_spec=layer_spec(transformer),
        **family.gpt_kwargs(hf_config, topology.tp),
        pre_process=topology.is_first_stage,
        post_process=topology.is_last_stage,
    )
    chunk.to(platform.current().device)
    if topology.is_last_stage:
        chunk.output_layer.selected_positions = None
        chunk.output_layer.register_forward_pre_hook(_keep_selected)
    inner = Float16Module(transformer, chunk) if transformer.bf16 else chunk
    wrapped = DistributedDataParallel(
        config=transformer,
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            # The optimizer's own check covers all gradients at once and can name the loss; see Rank.
            check_for_nan_in_grad=False,
        ),
        module=inner,
    )
    transformer.no_sync_func = wrapped.no_sync
    transformer.finalize_model_grads_func = _finalize_without_scaling
    return Stage([chunk], [wrapped], transformer, family, hf_config, int(hf_config["vocab_size"]))


def transformer_config(config: Config, family: models.Family, hf_config: dict[str, Any]) -> TransformerConfig:
    """The family's architecture, the run's parallel degrees and what the platform can fuse."""
    here = platform.current()
    dtype = _DTYPES[config.model.dtype]
    if problems := family.problems(hf_config, config.parallel.tp, config.parallel.pp):
        raise ConfigError(problems, source=config.model.path)
    fused = here.is_cuda
    return TransformerConfig(
        **family.transformer_kwargs(hf_config),
        tensor_model_parallel_size=config.parallel.tp,
        pipeline_model_parallel_size=config.parallel.pp,
        num_layers_in_first_pipeline_stage=family.first_stage_layers(hf_config, config.parallel.pp),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from a checkpoint, never from a generator. perform_initialization=False would leave out more: the
        # initialisation marks which parameters are split over tensor ranks, and the gradient norm counts by that.
        init_method=_uninitialised,
        output_layer_init_method=_uninitialised,
        # A pipeline carries micro-batches of different lengths; stages tell each other the shapes.
        variable_seq_lengths=config.parallel.pp > 1,
        # Of no effect without experts, but Megatron refuses its default beside variable lengths in any model.
        moe_token_dispatcher_type="alltoall",
        # The loss is divided by the tokens of the whole mini-batch in the loss function: with this set, Megatron
        # neither divides it by the number of micro-batches nor averages the gradients over the replicas.
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=platform.kernels(here.kind).grad_accumulation,
        # These save memory passes when compiled, as they are on CUDA only; interpreted, plain torch is faster.
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused and platform.kernels(here.kind).spec == "transformer_engine",
    )


def layer_spec(transformer: TransformerConfig) -> ModuleSpec:
    """Transformer Engine's layers where they are in use, else Megatron's own ones in plain torch."""
    if platform.kernels(platform.current().kind).spec == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=transformer.num_moe_experts, qk_layernorm=transformer.qk_layernorm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        qk_layernorm=transformer.qk_layernorm,
        normalization=transformer.normalization,
    )
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    return spec


def _uninitialised(weight: Tensor) -> Tensor:
    return weight


def _keep_selected(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    # Prompts are ten times as long as responses, and logits are the largest tensors there are.
    positions, layer.selected_positions = layer.selected_positions, None
    if positions is None:
        return None
    hidden = inputs[0]  # [tokens, rows, hidden]
    return (hidden.flatten(0, 1).index_select(0, positions)[:, None], *inputs[1:])


def _finalize_without_scaling(chunks: list[nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    # Megatron would divide by the number of tokens here; the loss has been divided already.
    finalize_model_grads(chunks, None, **groups)
