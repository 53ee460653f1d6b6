"""A Megatron checkpoint is the same model however its writers cut the stacked tensors into chunks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megagent.parallel.convert import megatron_folder
from megagent.parallel.models import Architecture
from megagent.parallel.reshard import files, hold
from megagent.parallel.reshard.boxes import LocalTensor
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import make_plan
from tests.parallel.models.configs import TINY, tiny
from tests.parallel.reshard.arrays import Arrays, assert_equal, numbered, scattered


def stacked(model: Architecture, full: Arrays, tp: int) -> Arrays:
    """What Megatron stores, put together from whole tensors layer by layer: q k v by group, gate over up."""
    found = {}
    for stack in megatron_folder._stacks(model, tp):
        array = found[stack.keys[0]] = np.zeros(stack.shape, dtype=int)
        for numbers in itertools.product(*map(range, stack.counts)):
            layer, expert = (*numbers, 0, 0)[:2]
            for box in stack.full(model, stack.rest[0]).boxes:
                name = box.hf.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                array[numbers][box.local_slices] = full[name][box.hf_slices]
    return found


def chunks(model: Architecture, tp: int, cuts: int) -> Layout:
    """Every axis, of layers and experts too, in as many parts as divide it: 1 or `cuts`."""
    tensors: list[LocalTensor] = []
    for stack in megatron_folder._stacks(model, tp):
        sizes = tuple(size // cuts if size % cuts == 0 else size for size in stack.shape)
        for place in itertools.product(*(range(a // b) for a, b in zip(stack.shape, sizes, strict=True))):
            offsets = tuple(number * size for number, size in zip(place, sizes, strict=True))
            tensors.append(stack.chunk(model, offsets, sizes, "F32", total=stack.rest[0]))
    return Layout("chunks", {0: tuple(tensors)})


@pytest.mark.parametrize("cuts", [1, 2, 4])
@pytest.mark.parametrize("family", sorted(TINY))
def test_chunks_cut_along_any_axis_are_the_model(family: str, cuts: int) -> None:
    model = tiny(family)
    shapes = model.hf_shapes()
    full = numbered(shapes)
    layout = chunks(model, cuts, cuts)
    assert layout.problems(shapes) == []
    stored, held = stacked(model, full, cuts), scattered(layout, full)
    for tensor in layout.tensors[0]:
        key, _, place = tensor.name.partition(" from [")
        start = [int(number) for number in place.partition("]")[0].split(",")]
        part = tuple(slice(low, low + size) for low, size in zip(start, tensor.shape, strict=True))
        np.testing.assert_array_equal(held[0][tensor.name], stored[key][part], err_msg=tensor.name)
    whole = files.layout([{name: ("F32", shape) for name, shape in shapes.items()}])
    back = hold.allocate(whole, lambda shape: np.full(shape, -1))
    hold.execute(make_plan(layout, whole), held, back)
    assert_equal(back, {0: full})


def test_stored_names_are_those_of_both_layer_specs() -> None:
    """As Megatron-Core 0.16 writes them, with Transformer Engine's layers and with its own."""
    dense = [key for stack in megatron_folder._stacks(tiny("qwen2")) for key in stack.keys]
    assert dense == [
        "embedding.word_embeddings.weight",
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "decoder.layers.self_attention.linear_qkv.bias",
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.weight",
        "decoder.layers.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    mixture = [key for stack in megatron_folder._stacks(tiny("qwen3_moe")) for key in stack.keys]
    assert mixture[5:] == [
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.pre_mlp_layernorm.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.mlp.router.weight",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.mlp.experts.experts.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
