"""Megatron-Core GPT stages of a model architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from megagent.config import Config
from megagent.errors import ConfigError
from megagent.parallel import platform
from megagent.parallel.attention import TorchAttention
from megagent.parallel.degrees import Chunk, Degrees, Place, training_problems
from megagent.parallel.models import Architecture
from megagent.parallel.norm import TorchNorm
from megagent.parallel.output import OutputLayer, Question
from megagent.parallel.topology import Topology
from megagent.parallel.value_head import ValueHead

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Stage:
    """This rank's part of the model.

    chunks: the bare GPTModels, parallel.vpp of them in the order of the pipeline; wrapped: the same in Megatron's
    data-parallel wrapper, what the schedule runs.
    """

    chunks: list[GPTModel]
    wrapped: list[DistributedDataParallel]
    transformer: TransformerConfig
    architecture: Architecture
    degrees: Degrees
    place: Place
    values: bool = False  # whether the output layer is a value head
    packs: bool = False  # whether rows of a micro-batch lie end to end, without padding

    @property
    def micro_batch_multiple(self) -> int:
        """The interleaved schedule goes through the chunks by groups of as many micro-batches as there are stages."""
        return self.degrees.pp if len(self.chunks) > 1 else 1

    @property
    def length_multiple(self) -> int:
        """With sequence parallelism the tensor-parallel ranks share a micro-batch's positions equally."""
        return self.degrees.tp if self.transformer.sequence_parallel else 1

    def parameters(self) -> Iterator[nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def ask(self, question: Question) -> None:
        """What the next forward pass is to compute. No effect but on the last stage, whose output is then the answer,
        [1, n, ...]; without a question it is [rows, tokens, ...] of all positions."""
        for chunk in self.chunks:
            if chunk.post_process:
                chunk.output_layer.question = question


def build(config: Config, topology: Topology, architecture: Architecture, values: bool = False) -> Stage:
    """This rank's stage, with uninitialised weights. Collective (the data-parallel wrapper).

    values: a model that gives each token a value instead of logits.
    Raises ConfigError if the model cannot be split as config.parallel says.
    """
    degrees = topology.degrees
    architecture.require(degrees)
    if problems := training_problems(degrees, architecture.experts is not None):
        raise ConfigError(problems, source=f"{architecture.family} model")
    transformer = transformer_config(architecture, degrees, _DTYPES[config.model.dtype])
    chunks = build_chunks(transformer, architecture, degrees, topology.place, values)
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
    return Stage(chunks, wrapped, transformer, architecture, degrees, topology.place, values, config.trainer.pack_rows)


def transformer_config(architecture: Architecture, degrees: Degrees, dtype: torch.dtype) -> TransformerConfig:
    """The architecture, how it is split, and what the platform can fuse."""
    kernels = platform.kernels(platform.current().kind)
    options: dict[str, Any] = {
        **architecture.transformer_kwargs(),
        **degrees.pipeline_kwargs(architecture.layers),
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "expert_model_parallel_size": degrees.ep,
        "expert_tensor_parallel_size": degrees.expert_tp,
        "sequence_parallel": degrees.sequence_parallel and degrees.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Weights come from a checkpoint, never from a generator. perform_initialization=False would leave out more: the
        # initialisation marks which parameters are split over tensor ranks, and the gradient norm counts by that.
        "init_method": _uninitialised,
        "output_layer_init_method": _uninitialised,
        # A pipeline carries micro-batches of different lengths; stages tell each other the shapes.
        "variable_seq_lengths": degrees.pp > 1,
        # The interleaved schedule sends while it computes, and such sends are not batched.
        "overlap_p2p_comm": degrees.vpp > 1,
        "batch_p2p_comm": degrees.vpp == 1,
        # The only one that can do micro-batches of different lengths; Megatron checks that even without experts.
        "moe_token_dispatcher_type": "alltoall",
        # The loss of this package is all there is: one that pulls tokens towards idle experts would not be scaled with
        # it, and its value would depend on the cut into micro-batches.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": kernels.spec == "transformer_engine",
        # The loss is divided by the tokens of the whole mini-batch in the loss function: with this set, Megatron
        # neither divides it by the number of micro-batches nor averages the gradients over the replicas.
        "calculate_per_token_loss": True,
        # Megatron gives up an output's memory as soon as its sending has begun. That waits in the stream; without one,
        # Gloo would send what has been written over it by then.
        "deallocate_pipeline_outputs": kernels.stream or degrees.vpp == 1,
        "gradient_accumulation_fusion": kernels.grad_accumulation,
        # These save memory passes when compiled; interpreted, plain torch is faster.
        "bias_activation_fusion": kernels.compiled,
        "bias_dropout_fusion": kernels.compiled,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": kernels.spec == "transformer_engine",
    }
    return TransformerConfig(**options)


def build_chunks(
    transformer: TransformerConfig, architecture: Architecture, degrees: Degrees, place: Place, values: bool = False
) -> list[GPTModel]:
    """The GPTModels of a rank, in the order of the pipeline. Needs Megatron's process groups; not collective but for a
    tied output layer on another stage than the embedding."""
    mine = [chunk for chunk in architecture.stages(degrees) if chunk.pp_rank == place.pp_rank]
    return [_build_chunk(transformer, architecture, degrees, chunk, values) for chunk in mine]


def _build_chunk(
    transformer: TransformerConfig, architecture: Architecture, degrees: Degrees, chunk: Chunk, values: bool
) -> GPTModel:
    # Values are no words: their layer is tied to nothing.
    untied = {"share_embeddings_and_output_weights": False} if values else {}
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=block_spec(transformer, len(chunk.layers)),
        **(architecture.gpt_kwargs(degrees.tp) | untied),
        pre_process=chunk.has_embedding,
        post_process=chunk.has_output,
        vp_stage=chunk.vpp_rank if degrees.vpp > 1 else None,
    )
    if chunk.has_output and values:
        model.output_layer = ValueHead(transformer)
    elif chunk.has_output:
        OutputLayer.take_over(model.output_layer, architecture.vocab)
    return model.to(platform.current().device)


def block_spec(transformer: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    """Some layers, and the norm after the last one of the model."""
    norm = TorchNorm
    if platform.kernels(platform.current().kind).spec == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm as norm  # noqa: N813
    return TransformerBlockSubmodules(layer_specs=[layer_spec(transformer)] * layers, layer_norm=norm)


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


def _finalize_without_scaling(chunks: list[nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    # Megatron would divide by the number of tokens here; the loss has been divided already.
    finalize_model_grads(chunks, None, **groups)
