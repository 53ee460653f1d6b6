"""Megatron-Core GPT stages from a Hugging Face configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from megagent.config import Config
from megagent.errors import ConfigError
from megagent.parallel import models, platform
from megagent.parallel.attention import TorchAttention
from megagent.parallel.norm import TorchNorm
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

    chunks: the bare GPTModels, parallel.vpp of them in the order of the pipeline; wrapped: the same in Megatron's
    data-parallel wrapper, what the schedule runs; vocab: number of real (not padded) vocabulary entries.
    """

    chunks: list[GPTModel]
    wrapped: list[DistributedDataParallel]
    transformer: TransformerConfig
    family: models.Family
    hf_config: dict[str, Any]
    vocab: int

    @property
    def micro_batch_multiple(self) -> int:
        """The interleaved schedule goes through the chunks by groups of as many micro-batches as there are stages."""
        return self.transformer.pipeline_model_parallel_size if len(self.chunks) > 1 else 1

    @property
    def length_multiple(self) -> int:
        """With sequence parallelism the tensor-parallel ranks share a micro-batch's positions equally."""
        return self.transformer.tensor_model_parallel_size if self.transformer.sequence_parallel else 1

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
    chunks = [
        _chunk(transformer, topology, family, hf_config, number if config.parallel.vpp > 1 else None)
        for number in range(config.parallel.vpp)
    ]
    wrapped = [
        DistributedDataParallel(
            config=transformer,
            ddp_config=DistributedDataParallelConfig(
                use_distributed_optimizer=config.parallel.distributed_optimizer,
                grad_reduce_in_fp32=True,
                # The optimizer's own check covers all gradients at once and can name the loss; see Rank.
                check_for_nan_in_grad=False,
            ),
            module=Float16Module(transformer, chunk) if transformer.bf16 else chunk,
        )
        for chunk in chunks
    ]
    no_sync = [chunk.no_sync for chunk in wrapped]
    transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    transformer.finalize_model_grads_func = _finalize_without_scaling
    return Stage(chunks, wrapped, transformer, family, hf_config, int(hf_config["vocab_size"]))


def _chunk(
    transformer: TransformerConfig,
    topology: Topology,
    family: models.Family,
    hf_config: dict[str, Any],
    number: int | None,
) -> GPTModel:
    """Chunk `number` of this rank's stage; None if it has only one."""
    last = (transformer.virtual_pipeline_model_parallel_size or 1) - 1
    chunk = GPTModel(
        config=transformer,
        transformer_layer_spec=block_spec(transformer, number, topology.pp_rank),
        **family.gpt_kwargs(hf_config, topology.tp),
        pre_process=topology.is_first_stage and (number or 0) == 0,
        post_process=topology.is_last_stage and (number or 0) == last,
        vp_stage=number,
    )
    chunk.to(platform.current().device)
    if chunk.post_process:
        layer = chunk.output_layer
        layer.selected_positions = None
        layer.register_forward_pre_hook(_gather_and_select if transformer.sequence_parallel else _select)
        if transformer.sequence_parallel:
            # The hook gathers the positions, so that those without a wanted token can be left out.
            layer.sequence_parallel, layer.allreduce_dgrad = False, topology.tp > 1
    return chunk


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
        virtual_pipeline_model_parallel_size=config.parallel.vpp if config.parallel.vpp > 1 else None,
        expert_model_parallel_size=config.parallel.ep,
        expert_tensor_parallel_size=config.parallel.expert_tp,
        sequence_parallel=config.parallel.sequence_parallel and config.parallel.tp > 1,
        # The interleaved schedule sends while it computes; that way, receives are posted one by one.
        overlap_p2p_comm=config.parallel.vpp > 1,
        batch_p2p_comm=config.parallel.vpp == 1,
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
        # The only one that can do micro-batches of different lengths; Megatron checks that even without experts.
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=platform.kernels(here.kind).spec == "transformer_engine",
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


def block_spec(transformer: TransformerConfig, chunk: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """The layers of one chunk of a stage, and the norm after the last layer of the model."""
    count = get_num_layers_to_build(transformer, chunk, pp_rank)
    if platform.kernels(platform.current().kind).spec == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules([layer_spec(transformer)] * count, layer_norm=TENorm)
    return TransformerBlockSubmodules([layer_spec(transformer)] * count, layer_norm=TorchNorm)


def layer_spec(transformer: TransformerConfig) -> ModuleSpec:
    """Transformer Engine's layers where they are in use, else Megatron's own ones in plain torch."""
    if platform.kernels(platform.current().kind).spec == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=transformer.num_moe_experts,
            moe_grouped_gemm=transformer.moe_grouped_gemm,
            qk_layernorm=transformer.qk_layernorm,
        )
    spec = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        qk_layernorm=transformer.qk_layernorm,
        normalization=transformer.normalization,
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    if transformer.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return spec


def _uninitialised(weight: Tensor) -> Tensor:
    return weight


def _gather_and_select(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # The layer adds its input's gradient up over the ranks, so each of them keeps its positions of it.
    hidden = tensor_parallel.gather_from_sequence_parallel_region(inputs[0], tensor_parallel_output_grad=False)
    inputs = (hidden, *inputs[1:])
    return _select(layer, inputs) or inputs


def _select(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    # Prompts are ten times as long as responses, and logits are the largest tensors there are.
    positions, layer.selected_positions = layer.selected_positions, None
    if positions is None:
        return None
    hidden = inputs[0]  # [tokens, rows, hidden]
    return (hidden.flatten(0, 1).index_select(0, positions)[:, None], *inputs[1:])


def _finalize_without_scaling(chunks: list[nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    # Megatron would divide by the number of tokens here; the loss has been divided already.
    finalize_model_grads(chunks, None, **groups)
