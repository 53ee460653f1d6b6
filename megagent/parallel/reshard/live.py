"""What the model of a running vLLM worker holds, read off its own modules: nothing is taken from how it was planned.

Each kind of layer says how its parameters are cut out of Hugging Face tensors, so a model of such layers needs no entry
anywhere. What is of another kind, or quantized, is refused by name. As of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from megagent.errors import MegagentError
from megagent.parallel.reshard.apply import LiveTensor
from megagent.parallel.reshard.boxes import Box, LocalTensor, Region, Shape, whole
from megagent.parallel.reshard.transports.base import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # of dtypes, as safetensors writes them
# Kernels that compute with the experts as the checkpoint orders them (CPU: packed anew from that order).
_PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU)
_SHOWN = 20  # faults that an error lists


class _Refused(Exception):
    """Why a layer cannot be described."""


def describe(model: nn.Module) -> dict[str, LiveTensor]:
    """Every parameter of a worker's model by its name in the model.

    Raises MegagentError with the name of every layer and parameter that cannot be described, and why.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, LiveTensor] = {}
    owners: dict[int, str] = {}  # of a parameter -> the name that it was found under first
    known: set[int] = set()  # parameters of layers of known kinds
    refused: list[str] = []
    for name, layer in model.named_modules():
        kind = _KINDS.get(type(layer))
        if kind is None:
            continue
        known.update(id(parameter) for parameter in layer.parameters(recurse=False))
        try:
            for attribute, tensor in kind(name, layer, packed):
                parameter = getattr(layer, attribute)
                tie = owners.setdefault(id(parameter), tensor.name)
                if tie != tensor.name:
                    found[tie] = replace(found[tie], users=(*found[tie].users, layer))
                    continue
                users = () if isinstance(layer, RMSNorm) else (layer,)
                kept = isinstance(layer, RMSNorm | VocabParallelEmbedding)
                live = found[tensor.name] = LiveTensor(tensor, layer, attribute, users, kept)
                if fault := _misshapen(live):
                    raise _Refused(fault)
        except _Refused as reason:
            refused.append(f"{name} ({type(layer).__name__}): {reason}")
    refused += [
        f"{name}: {type(model.get_submodule(name.rpartition('.')[0])).__name__} layers are not known here"
        for name, parameter in model.named_parameters()
        if id(parameter) not in known
    ]
    if refused:
        raise MegagentError(
            f"{type(model).__name__} in vLLM cannot receive weights shard by shard; use rollout.sync=gather:"
            + _listed(refused)
        )
    return found


def compare(live: Mapping[str, LiveTensor], planned: Iterable[LocalTensor]) -> None:
    """Raises MegagentError with every difference between a worker's model and what the plan takes it to hold."""
    wanted = {tensor.name: tensor for tensor in planned}
    faults = [f"{name} is planned and not in the model" for name in wanted if name not in live]
    faults += [f"{name} is in the model and not planned" for name in live if name not in wanted]
    for name in wanted.keys() & live.keys():
        faults += (f"{name} {difference}" for difference in _differences(live[name].tensor, wanted[name]))
    if faults:
        raise MegagentError(
            "the engine's model is not what the plan of the weight sync takes it to be; give trainer and engine the "
            "same model folder, dtype and degrees:" + _listed(sorted(faults))
        )


def _differences(live: LocalTensor, planned: LocalTensor) -> Iterator[str]:
    if live.shape != planned.shape:
        yield f"is {list(live.shape)} in the model, {list(planned.shape)} in the plan"
    elif (set(live.boxes), set(live.padding)) != (set(planned.boxes), set(planned.padding)):
        yield "is made of other parts in the model than in the plan"
    if live.dtype != planned.dtype:
        yield f"is {live.dtype} in the model, {planned.dtype} in the plan"


def _listed(lines: list[str]) -> str:
    rest = len(lines) - _SHOWN
    shown = "".join(f"\n  {line}" for line in lines[:_SHOWN])
    return shown + (f"\n  and {rest} more" if rest > 0 else "")


def _misshapen(live: LiveTensor) -> str | None:
    """Why a parameter that is there as it was loaded does not look as its layer says; packed ones look otherwise."""
    shape, dtype = tuple(live.parameter.shape), live.parameter.dtype
    if live.parameter.device.type == "cpu" and not live.kept:
        return None
    if shape != live.tensor.shape or _NAMES.get(dtype) != live.tensor.dtype:
        return f"{live.attribute} is {list(shape)} {dtype}, not {list(live.tensor.shape)} {live.tensor.dtype}"
    return None


Described = Iterator[tuple[str, LocalTensor]]  # (attribute of the layer, what it holds)


def _dtype(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise _Refused(f"its weights are {dtype}; {', '.join(DTYPES)} can be received")
    return _NAMES[dtype]


def _require_plain(layer: Any, method: type) -> None:
    if not isinstance(layer.quant_method, method):
        raise _Refused(f"it is quantized ({type(layer.quant_method).__name__}); start the engine without quantization")


def _linear(
    name: str, layer: Any, parts: Sequence[tuple[str, int, int]], columns: tuple[int, int] | None = None
) -> Described:
    """parts: (name of the linear layer in the checkpoint, first row there, rows), below one another here.

    columns: (first, number) that this rank has of them, None for all.
    """
    _require_plain(layer, UnquantizedLinearMethod)
    dtype = _dtype(layer.params_dtype)
    first, width = columns or (0, layer.input_size)
    weights, biases, position = [], [], 0
    for part, start, rows in parts:
        weights.append(Box(f"{part}.weight", (start, first), (position, 0), (rows, width)))
        biases.append(Box(f"{part}.bias", (start,), (position,), (rows,)))
        position += rows
    yield "weight", LocalTensor(f"{name}.weight", (position, width), tuple(weights), dtype=dtype)
    if getattr(layer, "bias", None) is not None:
        yield "bias", LocalTensor(f"{name}.bias", (position,), tuple(biases), dtype=dtype)


def _parts_of(name: str, packed: Mapping[str, Sequence[str]], number: int) -> list[str]:
    """The linear layers in the checkpoint that a merged one is made of."""
    parent, _, own = name.rpartition(".")
    parts = packed.get(own, ())
    if len(parts) != number:
        raise _Refused(f"the model's packed_modules_mapping does not say which {number} layers {own} is made of")
    return [f"{parent}.{part}" for part in parts]


def _qkv(name: str, layer: Any, packed: Mapping[str, Sequence[str]]) -> Described:
    query, key = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    value, shared = layer.num_kv_heads * layer.v_head_size, layer.tp_rank // layer.num_kv_head_replicas
    q, k, v = _parts_of(name, packed, 3)
    return _linear(name, layer, [(q, layer.tp_rank * query, query), (k, shared * key, key), (v, shared * value, value)])


def _merged(name: str, layer: Any, packed: Mapping[str, Sequence[str]]) -> Described:
    sizes = [size // layer.tp_size for size in layer.output_sizes]
    parts = zip(_parts_of(name, packed, len(sizes)), sizes, strict=True)
    return _linear(name, layer, [(part, layer.tp_rank * size, size) for part, size in parts])


def _columns(name: str, layer: Any, _: Mapping[str, Sequence[str]]) -> Described:
    rows = layer.output_size_per_partition
    return _linear(name, layer, [(name, layer.tp_rank * rows, rows)])


def _rows(name: str, layer: Any, _: Mapping[str, Sequence[str]]) -> Described:
    width = layer.input_size_per_partition
    return _linear(name, layer, [(name, 0, layer.output_size)], (layer.tp_rank * width, width))


def _replicated(name: str, layer: Any, _: Mapping[str, Sequence[str]]) -> Described:
    return _linear(name, layer, [(name, 0, layer.output_size)])


def _vocabulary(name: str, layer: Any, _: Mapping[str, Sequence[str]]) -> Described:
    _require_plain(layer, UnquantizedEmbeddingMethod)
    if layer.num_added_embeddings:
        raise _Refused(f"it has {layer.num_added_embeddings} entries beside the model's vocabulary")
    held, total = layer.shard_indices.num_org_elements, layer.num_embeddings_per_partition
    start, dtype = layer.shard_indices.org_vocab_start_index, _dtype(layer.params_dtype)

    def entries(attribute: str, rest: Shape) -> LocalTensor:
        hf, origin = f"{name}.{attribute}", (0,) * len(rest)
        boxes = (Box(hf, (start, *origin), (0, *origin), (held, *rest)),) if held else ()
        padding = (Region((held, *origin), (total - held, *rest)),) if held < total else ()
        return LocalTensor(hf, (total, *rest), boxes, padding, dtype)

    yield "weight", entries("weight", (layer.embedding_dim,))
    if getattr(layer, "bias", None) is not None:
        yield "bias", entries("bias", ())


def _norm(name: str, layer: Any, _: Mapping[str, Sequence[str]]) -> Described:
    if layer.has_weight:
        yield "weight", whole(f"{name}.weight", tuple(layer.weight.shape), _dtype(layer.weight.dtype))


def _experts(name: str, layer: Any, _: Mapping[str, Sequence[str]]) -> Described:
    _require_plain(layer, UnquantizedFusedMoEMethod)
    config, backend = layer.moe_config, layer.quant_method.unquantized_backend
    if backend not in _PLAIN_EXPERTS:
        raise _Refused(f"the {backend.value} kernel reorders its experts; start the engine with --moe-backend triton")
    if config.moe_parallel_config.enable_eplb or layer.expert_map_manager.num_fused_shared_experts:
        raise _Refused("its experts move between ranks or are fused with shared ones; switch load balancing off")
    if config.has_bias or not config.is_act_and_mul:
        raise _Refused("its experts have biases or no gate")
    width, hidden, dtype = layer.intermediate_size_per_partition, layer.hidden_size, _dtype(layer.params_dtype)
    first = config.moe_parallel_config.tp_rank * width
    mixture = name.rpartition(".")[0]
    gate, up, down = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    experts = _local_experts(layer)
    w13 = tuple(
        Box(f"{mixture}.{expert}.{part}.weight", (first, 0), (number, position, 0), (width, hidden))
        for number, expert in enumerate(experts)
        for part, position in ((gate, 0), (up, width))
    )
    w2 = tuple(
        Box(f"{mixture}.{expert}.{down}.weight", (0, first), (number, 0, 0), (hidden, width))
        for number, expert in enumerate(experts)
    )
    yield "w13_weight", LocalTensor(f"{name}.w13_weight", (len(experts), 2 * width, hidden), w13, dtype=dtype)
    yield "w2_weight", LocalTensor(f"{name}.w2_weight", (len(experts), hidden, width), w2, dtype=dtype)


def _local_experts(layer: Any) -> list[int]:
    """Global numbers of the experts on this rank, in the order that it holds them."""
    if layer._expert_map is None:
        return list(range(layer.local_num_experts))
    places = enumerate(layer._expert_map.tolist())  # of each expert its place here, -1 if it is elsewhere
    return [expert for _, expert in sorted((place, expert) for expert, place in places if place >= 0)]


# Of exactly these types: a subclass may hold its weights otherwise.
_KINDS: Mapping[type, Callable[[str, Any, Mapping[str, Sequence[str]]], Described]] = {
    QKVParallelLinear: _qkv,
    MergedColumnParallelLinear: _merged,
    ColumnParallelLinear: _columns,
    RowParallelLinear: _rows,
    ReplicatedLinear: _replicated,
    GateLinear: _replicated,
    VocabParallelEmbedding: _vocabulary,
    ParallelLMHead: _vocabulary,
    RMSNorm: _norm,
    RoutedExperts: _experts,
}
