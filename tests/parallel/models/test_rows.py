"""The kinds of rows by numbers a reader can check by hand: how Megatron lays out what Hugging Face stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from megagent.errors import MegagentError
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture
from megagent.parallel.models.rows import padded
from tests.parallel.models.configs import tiny


def on_rank(architecture: Architecture, name: str, degrees: Degrees, rank: int, full: Mapping[str, Any]) -> list[Any]:
    """A rank's tensor, put together from whole Hugging Face tensors."""
    tensor = architecture.local(name, degrees, degrees.place(rank))
    local = np.full(tensor.shape, -1)
    for box in tensor.boxes:
        local[box.local_slices] = np.asarray(full[box.hf])[box.hf_slices]
    for region in tensor.padding:
        local[region.slices] = 0
    return local.tolist()


def test_qkv_interleaves_query_groups() -> None:
    bias = "decoder.layers.1.self_attention.linear_qkv.bias"
    full = {
        "model.layers.1.self_attn.q_proj.bias": [10, 11, 12, 13],
        "model.layers.1.self_attn.k_proj.bias": [20, 21],
        "model.layers.1.self_attn.v_proj.bias": [30, 31],
    }
    model = tiny("qwen2", hidden_size=4, head_dim=1)
    assert on_rank(model, bias, Degrees(), 0, full) == [10, 11, 20, 30, 12, 13, 21, 31]
    assert on_rank(model, bias, Degrees(tp=2), 1, full) == [12, 13, 21, 31]
    # More ranks than key/value heads: Megatron cuts the same rows without regard to groups.
    assert on_rank(model, bias, Degrees(tp=4), 2, full) == [12, 13]
    assert on_rank(model, bias, Degrees(tp=4), 3, full) == [21, 31]


def test_gate_lies_over_up_on_every_rank() -> None:
    full = {
        "model.layers.0.mlp.gate_proj.weight": [[1], [2], [3], [4]],
        "model.layers.0.mlp.up_proj.weight": [[5], [6], [7], [8]],
    }
    model = tiny("qwen2", hidden_size=1, intermediate_size=4, head_dim=1)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert on_rank(model, name, Degrees(tp=2), 0, full) == [[1], [2], [5], [6]]
    assert on_rank(model, name, Degrees(tp=2), 1, full) == [[3], [4], [7], [8]]


def test_an_expert_is_split_over_the_expert_tensor_ranks_only() -> None:
    model = tiny("mixtral", hidden_size=1, intermediate_size=4, head_dim=1)
    full = {
        "model.layers.0.block_sparse_moe.experts.3.w1.weight": [[1], [2], [3], [4]],
        "model.layers.0.block_sparse_moe.experts.3.w3.weight": [[5], [6], [7], [8]],
    }
    name = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"
    split, whole = Degrees(tp=2), Degrees(tp=2, ep=2, etp=1)
    assert on_rank(model, name, split, 1, full) == [[3], [4], [7], [8]]
    assert on_rank(model, name, whole, 1, full) == [[1], [2], [3], [4], [5], [6], [7], [8]]
    assert model.experts_of(whole, whole.place(1)) == range(2, 4)


def test_vocabulary_padding_fills_the_end_with_zeros() -> None:
    model = tiny("qwen2", vocab_size=11, hidden_size=1, head_dim=1)
    full = {"model.embed_tokens.weight": [[number] for number in range(1, 12)]}
    name = "embedding.word_embeddings.weight"
    parts = [np.ravel(on_rank(model, name, Degrees(tp=2), rank, full)).tolist() for rank in (0, 1)]
    assert parts == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0, 0, 0]]


def test_a_rank_may_hold_nothing_but_padding() -> None:
    degrees = Degrees(tp=2)
    tensor = tiny("qwen2", vocab_size=5).local("embedding.word_embeddings.weight", degrees, degrees.place(1))
    assert tensor.boxes == ()
    assert tensor.padding[0].shape == (8, 8)


def test_a_split_that_does_not_come_out_even_is_an_error() -> None:
    degrees = Degrees(tp=8)
    with pytest.raises(MegagentError, match=r"linear_fc2\.weight: 12 does not split over 8 tensor-parallel ranks"):
        tiny("qwen2").local("decoder.layers.0.mlp.linear_fc2.weight", degrees)


def test_vocabulary_pads_to_eight_entries_a_rank() -> None:
    assert [padded(50, tp) for tp in (1, 2, 4, 8)] == [56, 64, 64, 64]
    assert [padded(152064, tp) for tp in (1, 2, 4, 8)] == [152064] * 4
