"""Hugging Face -> Megatron -> Hugging Face, bit by bit, in every family at every combination of degrees, on arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.errors import ConfigError
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard import files, hold, megatron
from megagent.parallel.reshard.plan import make_plan
from tests.parallel.models.configs import REAL, TINY, tiny
from tests.parallel.reshard.arrays import NOTHING, ROOM, assert_equal, empty, numbered, scattered
from tests.parallel.reshard.random_models import all_degrees, placed_models

KINDS = ("tied", "untied")
MODELS = {
    **{f"{family}-{kind}": (family, {"tie_word_embeddings": kind == "tied"}) for family in TINY for kind in KINDS},
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_round_trip_gives_the_same_bits(name: str) -> None:
    family, changes = MODELS[name]
    model = tiny(family, num_hidden_layers=8, **changes)
    shapes = model.hf_shapes()
    checkpoint = files.layout(files.sharded(shapes, "BF16", shard_bytes=300))
    before = scattered(checkpoint, numbered(shapes))
    combinations = all_degrees(model)
    assert len(combinations) == (30 if model.experts else 15)  # vpp=2 needs pp=2 or 4
    for degrees in combinations:
        ranks = megatron.layout(model, degrees)
        held, after = empty(ranks), empty(checkpoint)
        hold.execute(make_plan(checkpoint, ranks), before, held)
        assert not any((array == NOTHING).any() for arrays in held.values() for array in arrays.values())
        hold.execute(make_plan(ranks, checkpoint), held, after)
        assert_equal(after, before)


@settings(deadline=None, max_examples=60)
@given(placed_models())
def test_ranks_hold_each_element_of_a_random_model(placed: tuple[Architecture, Degrees]) -> None:
    model, degrees = placed
    megatron.layout(model, degrees).check(model.hf_shapes())


@settings(deadline=None, max_examples=40)
@given(placed_models(), st.data())
def test_weights_move_between_any_degrees(placed: tuple[Architecture, Degrees], data: st.DataObject) -> None:
    model, degrees = placed
    others = [other for other in all_degrees(model) if other.world <= 8]
    source, target = megatron.layout(model, degrees), megatron.layout(model, data.draw(st.sampled_from(others)))
    full = numbered(model.hf_shapes())
    held = empty(target)
    hold.execute(make_plan(source, target), scattered(source, full, padding=ROOM), held)
    assert_equal(held, scattered(target, full))


@pytest.mark.parametrize("family", TINY)
def test_ranks_side_by_side_are_the_tensor_of_one_rank(family: str) -> None:
    """Concatenated shards equal the tp=1 tensor: what Megatron's own checkpoints rely on to change tp."""
    model = tiny(family)
    full = numbered(model.hf_shapes())
    (one,) = scattered(megatron.layout(model, Degrees()), full).values()
    split = scattered(megatron.layout(model, Degrees(tp=2)), full)
    axes = {"linear_proj.weight": 1, "linear_fc2.weight": 1, "linear_qkv": 0}
    for name, array in one.items():
        axis = next((axis for part, axis in axes.items() if part in name), None)
        if axis is not None:
            np.testing.assert_array_equal(np.concatenate([split[0][name], split[1][name]], axis=axis), array)


def test_a_tied_head_on_the_last_stage_holds_the_embedding() -> None:
    """Tied heads were dropped where the embedding is on another stage."""
    model = tiny("qwen2", tie_word_embeddings=True)
    degrees = Degrees(tp=2, pp=2)
    held = scattered(megatron.layout(model, degrees), numbered(model.hf_shapes()))
    for first, last in ((0, 2), (1, 3)):
        np.testing.assert_array_equal(
            held[last]["output_layer.weight"], held[first]["embedding.word_embeddings.weight"]
        )


def test_padding_of_the_vocabulary_never_reaches_a_file() -> None:
    model = tiny("qwen2")
    ranks = megatron.layout(model, Degrees(tp=4))
    checkpoint = files.layout([{name: ("BF16", shape) for name, shape in model.hf_shapes().items()}])
    after = empty(checkpoint)
    hold.execute(make_plan(ranks, checkpoint), scattered(ranks, numbered(model.hf_shapes()), padding=ROOM), after)
    assert after[0]["model.embed_tokens.weight"].shape == (50, 8)
    assert not any((array == ROOM).any() for array in after[0].values())


def test_interleaved_uneven_stages_hold_each_layer_once() -> None:
    """Offsets of uneven stages with vpp were wrong, so that a layer was read twice and another never."""
    model = tiny("qwen2", num_hidden_layers=7)
    degrees = Degrees(pp=2, vpp=2)
    ranks = megatron.layout(model, degrees)
    ranks.check(model.hf_shapes())
    layers = [
        sorted({int(tensor.name.split(".")[2]) for tensor in ranks.tensors[rank] if ".layers." in tensor.name})
        for rank in (0, 1)
    ]
    assert layers == [[0, 3, 4], [1, 2, 5, 6]]


def test_replicas_hold_the_same_and_each_is_read() -> None:
    model = tiny("qwen3_moe")
    ranks = megatron.layout(model, Degrees(tp=2, dp=2, ep=2))
    assert [tensor.name for tensor in ranks.tensors[0] if ".experts." not in tensor.name] == [
        tensor.name for tensor in ranks.tensors[2] if ".experts." not in tensor.name
    ]
    checkpoint = files.layout(files.sharded(model.hf_shapes(), "BF16", shard_bytes=100))
    assert {copy.source_rank for copy in make_plan(ranks, checkpoint).copies} == {0, 1, 2, 3}


def test_degrees_that_cannot_hold_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.tp=8 does not divide the 4 attention heads"):
        megatron.layout(tiny("qwen2"), Degrees(tp=8))


def test_the_plan_of_the_largest_model_is_sound() -> None:
    """235 billion parameters on 64 ranks, both ways."""
    model = architecture_of(REAL["Qwen/Qwen3-235B-A22B"])
    ranks = megatron.layout(model, Degrees(tp=4, pp=8, ep=8, etp=1, dp=2))
    checkpoint = files.layout(files.sharded(model.hf_shapes(), "BF16", shard_bytes=4 << 30))
    for plan in (make_plan(checkpoint, ranks), make_plan(ranks, checkpoint)):
        plan.check()
