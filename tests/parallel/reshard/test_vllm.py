"""vLLM's parameters by numbers a reader can check by hand, and on random models from every Megatron layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.errors import ConfigError
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard import files, hold, megatron, vllm
from megagent.parallel.reshard.plan import make_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import REAL, tiny
from tests.parallel.reshard.arrays import ROOM, Arrays, assert_equal, empty, numbered, scattered
from tests.parallel.reshard.random_models import placed_models


def held_by(model: Architecture, workers: Workers, full: Mapping[str, Any] | None = None) -> dict[int, Arrays]:
    shapes = model.hf_shapes()
    arrays = numbered(shapes)
    arrays |= {name: np.asarray(values).reshape(shapes[name]) for name, values in (full or {}).items()}
    return scattered(vllm.layout(model, workers), arrays)


def test_q_k_and_v_are_one_tensor_and_key_heads_repeat_where_ranks_outnumber_them() -> None:
    full = {
        "model.layers.1.self_attn.q_proj.bias": [10, 11, 12, 13],
        "model.layers.1.self_attn.k_proj.bias": [20, 21],
        "model.layers.1.self_attn.v_proj.bias": [30, 31],
    }
    model, name = tiny("qwen2", hidden_size=4, head_dim=1), "model.layers.1.self_attn.qkv_proj.bias"
    one, two, four = (held_by(model, Workers(tp=tp), full) for tp in (1, 2, 4))
    assert one[0][name].tolist() == [10, 11, 12, 13, 20, 21, 30, 31]
    assert [two[rank][name].tolist() for rank in range(2)] == [[10, 11, 20, 30], [12, 13, 21, 31]]
    assert [four[rank][name].tolist() for rank in range(4)] == [
        [10, 20, 30],
        [11, 20, 30],
        [12, 21, 31],
        [13, 21, 31],
    ]


def test_vocabulary_pads_to_64_entries_before_it_is_split() -> None:
    held = held_by(tiny("qwen2", vocab_size=70, hidden_size=1, head_dim=1), Workers(tp=2))
    first, second = (np.ravel(held[rank]["lm_head.weight"]) for rank in (0, 1))
    assert len(first) == len(second) == 64
    assert (first != 0).all()
    assert np.flatnonzero(second).tolist() == list(range(6))


@pytest.mark.parametrize(("expert_parallel", "shapes"), [(False, (4, 4, 1, 2)), (True, (2, 8, 1, 4))])
def test_experts_of_a_layer_are_one_tensor_of_slices_or_of_whole_experts(
    expert_parallel: bool, shapes: tuple[int, int, int, int]
) -> None:
    model = tiny("mixtral", hidden_size=1, intermediate_size=4, head_dim=1)
    held = held_by(
        model,
        Workers(tp=2, expert_parallel=expert_parallel),
        {
            "model.layers.0.block_sparse_moe.experts.2.w1.weight": [1, 2, 3, 4],
            "model.layers.0.block_sparse_moe.experts.2.w3.weight": [5, 6, 7, 8],
            "model.layers.0.block_sparse_moe.experts.2.w2.weight": [9, 10, 11, 12],
        },
    )
    experts, rows, _, columns = shapes
    up, down = (f"model.layers.0.block_sparse_moe.experts.routed_experts.{part}_weight" for part in ("w13", "w2"))
    assert held[1][up].shape == (experts, rows, 1)
    assert held[1][down].shape == (experts, 1, columns)
    of_two = (held[1][up][-2 if not expert_parallel else 0], held[1][down][-2 if not expert_parallel else 0])
    wanted = ([1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]) if expert_parallel else ([3, 4, 7, 8], [11, 12])
    assert tuple(np.ravel(part).tolist() for part in of_two) == wanted


def test_layers_left_over_go_to_the_stages_before_the_last() -> None:
    sizes = [len(Workers(pp=4).layers(tiny("qwen2", num_hidden_layers=6), stage)) for stage in range(4)]
    assert sizes == [1, 2, 2, 1]


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    workers = Workers(tp=3, expert_parallel=True)
    assert [list(workers.experts(tiny("mixtral"), rank)) for rank in range(3)] == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("family", "tied", "first", "last"),
    [
        ("llama", False, {"model.embed_tokens"}, {"model.norm", "lm_head"}),
        ("llama", True, {"model.embed_tokens"}, {"model.embed_tokens", "model.norm"}),
        ("mixtral", False, {"model.embed_tokens", "model.norm", "lm_head"}, None),  # on every stage
    ],
)
def test_ends_of_the_model_are_on_the_stages_that_use_them(
    family: str, tied: bool, first: set[str], last: set[str] | None
) -> None:
    held = held_by(tiny(family, tie_word_embeddings=tied), Workers(pp=2))
    ends = [{name.removesuffix(".weight") for name in held[rank] if ".layers." not in name} for rank in (0, 1)]
    assert ends == [first, last or first]


@settings(deadline=None, max_examples=40)
@given(placed_models(), st.data())
def test_weights_move_from_any_megatron_ranks_to_any_workers_and_back_to_files(
    placed: tuple[Architecture, Degrees], data: st.DataObject
) -> None:
    model, degrees = placed
    candidates = [
        Workers(tp, pp, engines, expert_parallel)
        for tp in (1, 2, 4)
        for pp in (1, 2, 3)
        for engines in (1, 2)
        for expert_parallel in (False, model.experts is not None)
    ]
    workers = data.draw(st.sampled_from([each for each in candidates if not each.problems(model)]))
    source, target = megatron.layout(model, degrees), vllm.layout(model, workers)
    target.check(model.hf_shapes())
    full = numbered(model.hf_shapes())
    held = empty(target)
    hold.execute(make_plan(source, target), scattered(source, full, padding=ROOM), held)
    assert_equal(held, scattered(target, full))
    checkpoint = files.layout(files.sharded(model.hf_shapes(), "BF16", shard_bytes=200))
    back = empty(checkpoint)
    hold.execute(make_plan(target, checkpoint), held, back)
    assert_equal(back, scattered(checkpoint, full))


def test_workers_that_cannot_hold_the_model_are_refused_with_every_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        vllm.layout(architecture_of(REAL["Qwen/Qwen2.5-7B"]), Workers(tp=3, pp=29))
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "rollout.tp=3 does not divide the 28 attention heads",
        "rollout.tp=3 does not divide the 18944 feed-forward columns",
        "rollout.tp=3 neither divides the 4 key/value heads nor is a multiple of them",
        "rollout.pp=29 is more than the 28 layers",
    ]
