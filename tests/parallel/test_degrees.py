"""Ranks, chunks and the degrees that contradict each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.parallel.degrees import Degrees


def layers_of(degrees: Degrees, layers: int) -> list[list[int]]:
    return [list(chunk.layers) for chunk in degrees.chunks(layers)]


def test_ranks_count_tensor_first_and_pipeline_last() -> None:
    degrees = Degrees(tp=2, pp=2, dp=2)
    assert degrees.world == 8
    coordinates = [(place.tp_rank, place.dp_rank, place.pp_rank) for place in degrees.places()]
    assert coordinates[:5] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1)]


def test_experts_have_a_grid_of_their_own_over_the_ranks_of_a_stage() -> None:
    degrees = Degrees(tp=2, dp=4, ep=2, etp=2)
    assert degrees.expert_dp == 2
    coordinates = [(place.etp_rank, place.ep_rank, place.edp_rank) for place in degrees.places()]
    assert coordinates == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]


def test_without_an_etp_experts_are_split_as_the_rest() -> None:
    assert Degrees(tp=4, dp=2, ep=2).expert_tp == 4


def test_interleaved_chunks_go_round_the_stages() -> None:
    degrees = Degrees(pp=2, vpp=2)
    assert layers_of(degrees, 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [(chunk.pp_rank, chunk.vpp_rank) for chunk in degrees.chunks(8)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_layers_left_over_go_to_the_middle() -> None:
    assert layers_of(Degrees(pp=4), 6) == [[0], [1, 2], [3, 4], [5]]
    assert [len(layers) for layers in layers_of(Degrees(pp=8), 94)] == [11, 12, 12, 12, 12, 12, 12, 11]


def test_embedding_and_output_may_count_as_a_layer_each() -> None:
    counted = Degrees(pp=4, count_embedding=True, count_output=True)
    assert layers_of(counted, 6) == [[0], [1, 2], [3, 4], [5]]
    assert layers_of(counted, 2) == [[], [0], [1], []]


@settings(deadline=None, max_examples=100)
@given(
    layers=st.integers(1, 100),
    pp=st.integers(1, 8),
    vpp=st.integers(1, 4),
    embedding=st.booleans(),
    output=st.booleans(),
)
def test_every_layer_is_in_one_chunk_and_chunks_differ_by_one(
    layers: int, pp: int, vpp: int, embedding: bool, output: bool
) -> None:
    degrees = Degrees(pp=pp, vpp=vpp, count_embedding=embedding, count_output=output)
    if degrees.chunk_problems(layers):
        return
    chunks = degrees.chunks(layers)
    assert [layer for chunk in chunks for layer in chunk.layers] == list(range(layers))
    assert [chunk.has_embedding for chunk in chunks] == [True] + [False] * (pp * vpp - 1)
    assert [chunk.has_output for chunk in chunks] == [False] * (pp * vpp - 1) + [True]
    weights = [
        len(chunk.layers) + (embedding and chunk.has_embedding) + (output and chunk.has_output) for chunk in chunks
    ]
    assert max(weights) - min(weights) <= 1


def test_megatron_is_told_of_uneven_stages_and_of_nothing_else() -> None:
    assert Degrees(pp=2).pipeline_kwargs(4) == {}
    assert Degrees(pp=2, vpp=2).pipeline_kwargs(4) == {"virtual_pipeline_model_parallel_size": 2}
    assert Degrees(pp=2, count_embedding=True).pipeline_kwargs(3) == {
        "pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "decoder", "loss"]]
    }


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (Degrees(tp=0), "parallel.tp=0: use 1 or more"),
        (Degrees(vpp=2), "parallel.vpp=2 interleaves pipeline stages and parallel.pp=1 has none"),
        (Degrees(tp=2, ep=4), "parallel.ep=4 x etp=2 does not divide the tp=2 x dp=1 ranks of a pipeline stage"),
    ],
)
def test_degrees_that_contradict_each_other_are_named(degrees: Degrees, words: str) -> None:
    (problem,) = degrees.problems()
    assert problem.startswith(words)


def test_more_stages_than_layers_are_named() -> None:
    (problem,) = Degrees(pp=4, vpp=2).chunk_problems(6)
    assert problem == (
        "parallel.pp=4 x vpp=2 makes 8 stages of 6 layers and some would be empty; use a product of at most 6"
    )
