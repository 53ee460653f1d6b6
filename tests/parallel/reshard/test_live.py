"""What the receiver reads off layers that are made by hand, and refuses. Whole models: test_vllm_models.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from megagent.errors import MegagentError

pytest.importorskip("vllm")
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
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

from megagent.parallel.reshard.apply import LiveTensor
from megagent.parallel.reshard.boxes import Box, LocalTensor, Region
from megagent.parallel.reshard.live import compare, describe


def bare(kind: type, method: type, weights: dict[str, tuple[int, ...]], **attributes: Any) -> Any:
    """A layer of vLLM without what vLLM asks for to make one: parameters of these shapes, and attributes."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, shape in weights.items():
        layer.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))
    layer.quant_method = method.__new__(method)
    layer.params_dtype = torch.float32
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def replicated(method: type = UnquantizedLinearMethod, **attributes: Any) -> Any:
    return bare(
        ReplicatedLinear,
        method,
        {"weight": (2, 3), "bias": (2,)},
        **{"input_size": 3, "output_size": 2, **attributes},
    )


def embedding(kind: type = VocabParallelEmbedding, **attributes: Any) -> Any:
    """Rank 1 of 2 of 5 entries, padded to 8."""
    indices = SimpleNamespace(num_org_elements=1, org_vocab_start_index=4)
    defaults = {
        "num_added_embeddings": 0,
        "num_embeddings_per_partition": 4,
        "embedding_dim": 3,
        "shard_indices": indices,
    }
    return bare(kind, UnquantizedEmbeddingMethod, {"weight": (4, 3)}, **{**defaults, **attributes})


def experts(backend: UnquantizedMoeBackend = UnquantizedMoeBackend.CPU, **changes: Any) -> Any:
    """The second of two ranks that have whole experts, four altogether, placed in turns."""
    parallel = SimpleNamespace(enable_eplb=False, tp_rank=0)
    config = SimpleNamespace(moe_parallel_config=parallel, has_bias=False, is_act_and_mul=True)
    layer = bare(
        RoutedExperts,
        UnquantizedFusedMoEMethod,
        {"w13_weight": (2, 6, 2), "w2_weight": (2, 2, 3)},
        moe_config=config,
        expert_map_manager=SimpleNamespace(num_fused_shared_experts=0),
        intermediate_size_per_partition=3,
        hidden_size=2,
        local_num_experts=2,
        ckpt_gate_proj_name="w1",
        ckpt_up_proj_name="w3",
        ckpt_down_proj_name="w2",
        _expert_map=torch.tensor([-1, 0, -1, 1]),
    )
    nn.Module.__setattr__(layer, "quant_method", SimpleMethod(backend))
    for name, value in changes.items():
        setattr(config, name, value)
    return layer


class SimpleMethod(UnquantizedFusedMoEMethod):
    def __init__(self, backend: UnquantizedMoeBackend) -> None:
        nn.Module.__init__(self)
        self.unquantized_backend = backend


def refusal(**layers: nn.Module) -> str:
    with pytest.raises(MegagentError) as refused:
        describe(Model(**layers))
    return str(refused.value)


def test_key_and_value_heads_are_those_that_ranks_share() -> None:
    """Rank 2 of 4 ranks, 4 query heads and 2 key/value heads of 1 row each."""
    layer = bare(
        QKVParallelLinear,
        UnquantizedLinearMethod,
        {"weight": (3, 5), "bias": (3,)},
        num_heads=1,
        num_kv_heads=1,
        num_kv_head_replicas=2,
        head_size=1,
        v_head_size=1,
        tp_rank=2,
        input_size=5,
    )
    found = describe(Model(attn=Model(qkv_proj=layer)))
    assert found["attn.qkv_proj.bias"].tensor.boxes == (
        Box("attn.q_proj.bias", (2,), (0,), (1,)),
        Box("attn.k_proj.bias", (1,), (1,), (1,)),
        Box("attn.v_proj.bias", (1,), (2,), (1,)),
    )
    assert found["attn.qkv_proj.weight"].tensor.boxes[0] == Box("attn.q_proj.weight", (2, 0), (0, 0), (1, 5))


def test_columns_of_a_rank_and_a_whole_bias() -> None:
    layer = bare(
        RowParallelLinear,
        UnquantizedLinearMethod,
        {"weight": (2, 3), "bias": (2,)},
        input_size_per_partition=3,
        output_size=2,
        tp_rank=1,
    )
    found = describe(Model(o_proj=layer))
    assert found["o_proj.weight"].tensor.boxes == (Box("o_proj.weight", (0, 3), (0, 0), (2, 3)),)
    assert found["o_proj.bias"].tensor.boxes == (Box("o_proj.bias", (0,), (0,), (2,)),)


def test_a_vocabulary_ends_in_padding() -> None:
    [live] = describe(Model(embed_tokens=embedding())).values()
    assert live.tensor.boxes == (Box("embed_tokens.weight", (4, 0), (0, 0), (1, 3)),)
    assert live.tensor.padding == (Region((1, 0), (3, 3)),)


def test_a_tied_output_layer_is_another_user_of_the_embedding() -> None:
    first, head = embedding(), embedding(ParallelLMHead, bias=None)
    head.weight = first.weight
    found = describe(Model(embed_tokens=first, lm_head=head))
    assert list(found) == ["embed_tokens.weight"]
    assert found["embed_tokens.weight"].users == (first, head)


def test_experts_of_a_rank_are_those_that_its_map_says() -> None:
    found = describe(Model(experts=Model(routed_experts=experts())))
    w13, w2 = (found[f"experts.routed_experts.{part}_weight"].tensor for part in ("w13", "w2"))
    assert w13.boxes == (
        Box("experts.1.w1.weight", (0, 0), (0, 0, 0), (3, 2)),
        Box("experts.1.w3.weight", (0, 0), (0, 3, 0), (3, 2)),
        Box("experts.3.w1.weight", (0, 0), (1, 0, 0), (3, 2)),
        Box("experts.3.w3.weight", (0, 0), (1, 3, 0), (3, 2)),
    )
    assert [box.hf for box in w2.boxes] == ["experts.1.w2.weight", "experts.3.w2.weight"]


def test_every_layer_that_is_quantized_or_of_another_kind_is_named() -> None:
    class Fp8LinearMethod(UnquantizedLinearMethod.__mro__[1]):  # type: ignore[misc]
        pass

    Fp8LinearMethod.__abstractmethods__ = frozenset()
    text = refusal(gate=replicated(Fp8LinearMethod), conv=nn.Conv1d(1, 1, 1), kept=replicated())
    assert "gate (ReplicatedLinear): it is quantized (Fp8LinearMethod)" in text
    assert "conv.weight: Conv1d layers are not known" in text
    assert "conv.bias: Conv1d layers are not known" in text
    assert "rollout.sync=gather" in text
    assert "kept" not in text


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        (lambda: {"lm_head": embedding(num_added_embeddings=2)}, "2 entries beside the model's vocabulary"),
        (lambda: {"a": Model(b=experts(UnquantizedMoeBackend.FLASHINFER_CUTLASS))}, "--moe-backend triton"),
        (lambda: {"a": Model(b=experts(has_bias=True))}, "biases or no gate"),
        (lambda: {"gate": replicated(params_dtype=torch.float8_e4m3fn)}, "its weights are torch.float8_e4m3fn"),
        (lambda: {"embed": embedding(embedding_dim=2)}, r"weight is [4, 3] torch.float32, not [4, 2] F32"),
        (
            lambda: {
                "both": bare(MergedColumnParallelLinear, UnquantizedLinearMethod, {}, output_sizes=[4, 4], tp_size=2)
            },
            "packed_modules_mapping does not say which 2 layers both is made of",
        ),
    ],
)
def test_what_cannot_be_received_is_refused_with_the_reason(layers: Any, fault: str) -> None:
    assert fault in refusal(**layers())


def live_of(tensor: LocalTensor) -> dict[str, LiveTensor]:
    return {tensor.name: LiveTensor(tensor, nn.Identity(), "weight", (), kept=True)}


PLANNED = LocalTensor("w", (2, 2), (Box("hf", (0, 0), (0, 0), (2, 2)),), dtype="F32")


def test_a_model_as_it_was_planned_passes_whatever_the_order_of_its_parts() -> None:
    halves = tuple(Box("hf", (row, 0), (row, 0), (1, 2)) for row in range(2))
    compare(live_of(replace(PLANNED, boxes=halves)), [replace(PLANNED, boxes=halves[::-1])])


@pytest.mark.parametrize(
    ("planned", "fault"),
    [
        ([], "w is in the model and not planned"),
        ([PLANNED, replace(PLANNED, name="v")], "v is planned and not in the model"),
        ([replace(PLANNED, shape=(2, 3))], r"w is \[2, 2\] in the model, \[2, 3\] in the plan"),
        ([replace(PLANNED, dtype="BF16")], "w is F32 in the model, BF16 in the plan"),
        ([replace(PLANNED, boxes=(Box("hf", (2, 0), (0, 0), (2, 2)),))], "w is made of other parts"),
    ],
)
def test_a_model_that_is_not_what_was_planned_is_refused_by_name(planned: list[LocalTensor], fault: str) -> None:
    with pytest.raises(MegagentError, match=fault):
        compare(live_of(PLANNED), planned)
