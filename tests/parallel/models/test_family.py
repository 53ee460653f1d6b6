"""The boxes of a family: each destination element once, every Hugging Face element, Megatron's layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megagent.errors import MegagentError
from megagent.parallel.models import FAMILIES, family_of
from megagent.parallel.models.family import Family, LocalTensor, padded, split_layer
from megagent.parallel.models.qwen2 import QWEN2

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# config.json of the published models, as far as it says what the tensors are.
QWEN_1_5B = TINY | {
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
QWEN_7B = QWEN_1_5B | {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A random config and a tp that can split it."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    divisors = [number for number in (1, 2, 3, 4, 6, 8) if number % tp == 0 or tp % number == 0]
    kv_heads = draw(st.sampled_from(divisors))
    # Query heads: a multiple of the key heads and of the ranks.
    heads = int(np.lcm(kv_heads, tp)) * draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    config = TINY | {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 200)),
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": tp * draw(st.integers(1, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.booleans()),
    }
    assume(not QWEN2.problems(config, tp, pp=1))
    return config, tp


def scatter(tensor: LocalTensor, full: dict[str, np.ndarray]) -> np.ndarray:
    local = np.full(tensor.shape, np.nan)
    for box in tensor.boxes:
        local[box.local_slices] = full[box.hf][box.hf_slices]
    for region in tensor.padding:
        local[region.slices] = 0
    return local


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """A tensor of each shape in which every element is another number than all elements of all tensors."""
    full, start = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        full[name] = np.arange(start, start + size, dtype=np.float64).reshape(shape)
        start += size
    return full


@settings(deadline=None, max_examples=60)
@given(models())
def test_every_local_element_is_written_exactly_once(model: tuple[dict[str, Any], int]) -> None:
    config, tp = model
    for name in QWEN2.megatron_names(config):
        for rank in range(tp):
            tensor = QWEN2.local(config, name, rank, tp)
            writes = np.zeros(tensor.shape, dtype=int)
            for box in tensor.boxes:
                writes[box.local_slices] += 1
                assert writes[box.local_slices].shape == box.shape
            for region in tensor.padding:
                writes[region.slices] += 1
            assert (writes == 1).all(), name


@settings(deadline=None, max_examples=60)
@given(models())
def test_boxes_stay_inside_their_tensors_and_cover_every_hf_element(model: tuple[dict[str, Any], int]) -> None:
    config, tp = model
    shapes = QWEN2.hf_shapes(config)
    reads = {name: np.zeros(shape, dtype=int) for name, shape in shapes.items()}
    for name in QWEN2.megatron_names(config):
        for rank in range(tp):
            for box in QWEN2.local(config, name, rank, tp).boxes:
                assert reads[box.hf][box.hf_slices].shape == box.shape
                reads[box.hf][box.hf_slices] += 1
    for name, count in reads.items():
        assert count.min() == count.max(), name
        assert count.min() in (1, tp), name  # once if it is split, by every rank if it is replicated


@settings(deadline=None, max_examples=60)
@given(models())
def test_scatter_then_gather_is_the_identity(model: tuple[dict[str, Any], int]) -> None:
    config, tp = model
    full = numbered(QWEN2.hf_shapes(config))
    back = {name: np.full_like(value, np.nan) for name, value in full.items()}
    for name in QWEN2.megatron_names(config):
        for rank in range(tp):
            tensor = QWEN2.local(config, name, rank, tp)
            local = scatter(tensor, full)
            for box in tensor.boxes:
                back[box.hf][box.hf_slices] = local[box.local_slices]
    for name, value in full.items():
        np.testing.assert_array_equal(back[name], value)


@settings(deadline=None, max_examples=60)
@given(models())
def test_ranks_side_by_side_are_the_tensor_of_one_rank(model: tuple[dict[str, Any], int]) -> None:
    """Concatenated shards equal the tp=1 tensor: what Megatron's own checkpoints rely on to change tp."""
    config, tp = model
    full = numbered(QWEN2.hf_shapes(config))
    axes = {"linear_proj": 1, "linear_fc2": 1, "linear_qkv": 0}
    for name in QWEN2.megatron_names(config):
        axis = next((axis for part, axis in axes.items() if part in name), None)
        if axis is not None:
            one = scatter(QWEN2.local(config, name, 0, 1), full)
            shards = [scatter(QWEN2.local(config, name, rank, tp), full) for rank in range(tp)]
            np.testing.assert_array_equal(np.concatenate(shards, axis=axis), one)


def test_qkv_interleaves_query_groups() -> None:
    config = TINY | {"hidden_size": 4, "head_dim": 1}
    bias = "decoder.layers.1.self_attention.linear_qkv.bias"
    full = {
        "model.layers.1.self_attn.q_proj.bias": np.array([10, 11, 12, 13]),
        "model.layers.1.self_attn.k_proj.bias": np.array([20, 21]),
        "model.layers.1.self_attn.v_proj.bias": np.array([30, 31]),
    }
    assert scatter(QWEN2.local(config, bias, 0, 1), full).tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert scatter(QWEN2.local(config, bias, 1, 2), full).tolist() == [12, 13, 21, 31]
    # More ranks than key/value heads: Megatron cuts the same rows without regard to groups.
    assert scatter(QWEN2.local(config, bias, 2, 4), full).tolist() == [12, 13]
    assert scatter(QWEN2.local(config, bias, 3, 4), full).tolist() == [21, 31]


def test_gate_lies_over_up_on_every_rank() -> None:
    config = TINY | {"hidden_size": 1, "intermediate_size": 4, "head_dim": 1}
    full = {
        "model.layers.0.mlp.gate_proj.weight": np.array([[1], [2], [3], [4]]),
        "model.layers.0.mlp.up_proj.weight": np.array([[5], [6], [7], [8]]),
    }
    local = [scatter(QWEN2.local(config, "decoder.layers.0.mlp.linear_fc1.weight", rank, 2), full) for rank in (0, 1)]
    assert [part[:, 0].tolist() for part in local] == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_vocabulary_padding_fills_the_end_with_zeros() -> None:
    config = TINY | {"vocab_size": 11, "hidden_size": 1, "head_dim": 1}
    full = {"model.embed_tokens.weight": np.arange(1, 12).reshape(11, 1)}
    local = [scatter(QWEN2.local(config, "embedding.word_embeddings.weight", rank, 2), full) for rank in (0, 1)]
    assert local[0][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert local[1][:, 0].tolist() == [9, 10, 11, 0, 0, 0, 0, 0]


def test_a_rank_may_hold_nothing_but_padding() -> None:
    tensor = QWEN2.local(TINY | {"vocab_size": 5}, "embedding.word_embeddings.weight", 1, 2)
    assert tensor.boxes == ()
    assert tensor.padding[0].shape == (8, 8)


@pytest.mark.parametrize(("config", "parameters"), [(QWEN_1_5B, 1_543_714_304), (QWEN_7B, 7_615_616_512)])
def test_real_models_have_their_published_number_of_parameters(config: dict[str, Any], parameters: int) -> None:
    assert sum(int(np.prod(shape)) for shape in QWEN2.hf_shapes(config).values()) == parameters


@pytest.mark.parametrize("config", [QWEN_1_5B, QWEN_7B])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_real_vocabularies_need_no_padding(config: dict[str, Any], tp: int) -> None:
    assert QWEN2.padded_vocab(config, tp) == config["vocab_size"]
    assert padded(50, 4) == 64


@pytest.mark.parametrize("config", [QWEN_1_5B, QWEN_7B])
def test_pipeline_stages_hold_every_tensor_once_and_a_tied_copy(config: dict[str, Any]) -> None:
    half = config["num_hidden_layers"] // 2
    first = QWEN2.stage_names(config, range(half), first=True, last=False)
    last = QWEN2.stage_names(config, range(half, 2 * half), first=False, last=True)
    copies = ["output_layer.weight"] if config["tie_word_embeddings"] else []
    assert sorted(first + last) == sorted(QWEN2.megatron_names(config) + copies)


def test_tied_output_layer_reads_the_embedding_and_is_no_hf_tensor() -> None:
    config = TINY | {"tie_word_embeddings": True}
    assert "lm_head.weight" not in QWEN2.hf_shapes(config)
    assert {box.hf for box in QWEN2.local(config, "output_layer.weight", 0, 2).boxes} == {"model.embed_tokens.weight"}
    assert QWEN2.tied_hf_names(config) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert QWEN2.tied_hf_names(TINY) == {}


def test_both_layer_specs_name_the_same_norm() -> None:
    local, fused = (
        "decoder.layers.3.input_layernorm.weight",
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
    )
    assert QWEN2.canonical(fused) == QWEN2.canonical(local) == local
    config = TINY | {"num_hidden_layers": 4}
    assert QWEN2.local(config, fused, 0, 1).boxes == QWEN2.local(config, local, 0, 1).boxes
    assert QWEN2.canonical("decoder.layers.3.self_attention.q_layernorm.weight") is None


def test_layer_numbers_come_off_names() -> None:
    assert split_layer("decoder.layers.27.mlp.x") == ("decoder.layers.{layer}.mlp.x", 27)
    assert split_layer("decoder.final_layernorm.weight") == ("decoder.final_layernorm.weight", 0)


def test_layers_left_over_by_pp_go_to_the_first_stage() -> None:
    assert QWEN2.first_stage_layers(QWEN_7B, pp=4) is None
    assert QWEN2.first_stage_layers(QWEN_7B, pp=5) == 8  # and four stages of 5
    assert QWEN2.problems(QWEN_7B, tp=1, pp=5) == []


def test_a_tp_that_cannot_split_is_named_with_every_reason() -> None:
    problems = QWEN2.problems(QWEN_7B, tp=3, pp=8)
    assert len(problems) == 4
    assert problems[0] == "parallel.tp=3 does not divide the 28 attention heads; use a tp that does"
    with pytest.raises(MegagentError, match="does not divide the 28 attention heads"):
        QWEN2.local(QWEN_7B, "output_layer.weight", 0, 3)
    assert QWEN2.problems(QWEN_1_5B, tp=4, pp=7) == []  # two key/value heads shared by two ranks each


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope type linear"),
        ({"num_key_value_heads": 3}, "does not divide num_attention_heads"),
        ({"hidden_size": 9}, "does not divide hidden_size"),
    ],
)
def test_what_the_family_cannot_express_is_an_error(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MegagentError, match=words):
        QWEN2.sizes(TINY | change)


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 5e5}, {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_rotary_base_is_read_in_both_spellings(rope: dict[str, Any]) -> None:
    assert QWEN2.gpt_kwargs(TINY | rope, 1)["rotary_base"] == 5e5


def test_unknown_architectures_are_answered_with_the_known_ones() -> None:
    with pytest.raises(MegagentError, match=r"LlamaForCausalLM.*one of: Qwen2ForCausalLM"):
        family_of({"architectures": ["LlamaForCausalLM"]})
    assert family_of(TINY) is QWEN2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tables_are_immutable(family: Family) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.tensors[0].at = "last"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.name = "other"  # type: ignore[misc]
