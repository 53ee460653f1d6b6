"""What an architecture answers: names with global numbers, ties, and the degrees that cannot hold it."""

from __future__ import annotations

import pytest

from megagent.errors import ConfigError, MegagentError
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.models.architecture import split_name
from tests.parallel.models.configs import REAL, tiny

QWEN_1_5B, QWEN_7B, MIXTURE = (
    architecture_of(REAL[name]) for name in ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-235B-A22B")
)


GATED = ("gate", "up", "down")


@pytest.mark.parametrize("model", [QWEN_1_5B, QWEN_7B], ids=["tied", "untied"])
@pytest.mark.parametrize("degrees", [Degrees(pp=2), Degrees(pp=5), Degrees(pp=2, vpp=2)])
def test_chunks_hold_every_tensor_once_and_a_tied_copy(model: Architecture, degrees: Degrees) -> None:
    names = [name for chunk in model.stages(degrees) for name in model.chunk_names(chunk)]
    copies = ["output_layer.weight"] if model.tied else []
    assert sorted(names) == sorted(model.megatron_names() + copies)


def test_a_stage_with_both_ends_of_a_tied_model_needs_no_copy() -> None:
    (chunk,) = QWEN_1_5B.stages(Degrees())
    assert "output_layer.weight" not in QWEN_1_5B.chunk_names(chunk)


def test_tied_output_layer_reads_the_embedding_and_is_no_hf_tensor() -> None:
    model = tiny("qwen2", tie_word_embeddings=True)
    assert "lm_head.weight" not in model.hf_shapes()
    copy = model.local("output_layer.weight", Degrees(tp=2))
    assert {box.hf for box in copy.boxes} == {"model.embed_tokens.weight"}
    assert copy.copy
    assert model.tied_hf_names() == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tiny("qwen2").tied_hf_names() == {}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "decoder.layers.1.mlp.linear_fc1.bias"),
        ("mistral", "decoder.layers.1.self_attention.linear_qkv.bias"),
        ("qwen2", "decoder.layers.1.self_attention.q_layernorm.weight"),
        ("qwen2", "decoder.layers.1.mlp.router.weight"),
    ],
)
def test_tensors_of_other_models_are_not_known(family: str, name: str) -> None:
    assert tiny(family).canonical(name) is None
    with pytest.raises(MegagentError, match=f"{name} is no tensor of a {family} model"):
        tiny(family).local(name, Degrees())


def test_biases_are_tensors_where_the_config_says_so() -> None:
    shapes = tiny("llama", attention_bias=True, mlp_bias=True).hf_shapes()
    biases = [name.removeprefix("model.layers.0.") for name in shapes if ".0." in name and name.endswith(".bias")]
    assert sorted(biases) == sorted(
        [f"self_attn.{part}_proj.bias" for part in "qkvo"]
        + [f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")]
    )


@pytest.mark.parametrize(
    ("fused", "local"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ],
)
def test_both_layer_specs_name_the_same_norm(fused: str, local: str) -> None:
    model = tiny("qwen2")
    fused, local = f"decoder.layers.3.{fused}", f"decoder.layers.3.{local}"
    assert model.canonical(fused) == model.canonical(local) == local
    assert model.local(fused, Degrees()).boxes == model.local(local, Degrees()).boxes


def test_both_layer_specs_name_the_same_expert() -> None:
    model = tiny("qwen3_moe")
    grouped, listed = (
        "decoder.layers.2.mlp.experts.linear_fc1.weight3",
        "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight",
    )
    assert model.canonical(grouped) == listed
    assert model.local(grouped, Degrees()).boxes == model.local(listed, Degrees()).boxes


def test_module_names_become_global_by_the_layers_and_experts_that_they_count_from() -> None:
    model = tiny("mixtral")
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"
    wanted = "decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight"
    assert model.canonical(name, layers=[2, 3], first_expert=2) == wanted
    assert model.canonical(name, layers=[2]) is None  # there is no second layer in the chunk
    assert model.canonical("output_layer.weight", layers=[2, 3], first_expert=2) == "output_layer.weight"


def test_names_of_stages_never_collide() -> None:
    """A layer that bears its pipeline-local number overwrites another stage's on export."""
    model = tiny("qwen2")
    degrees = Degrees(pp=2, vpp=2)
    names = [
        model.canonical(f"decoder.layers.{position}.mlp.linear_fc2.weight", layers=chunk.layers)
        for chunk in model.stages(degrees)
        for position in range(len(chunk.layers))
    ]
    assert names == [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(4)]


def test_layer_and_expert_numbers_come_off_names() -> None:
    assert split_name("decoder.layers.27.mlp.x") == ("decoder.layers.{layer}.mlp.x", 27, 0)
    assert split_name("decoder.layers.3.mlp.experts.linear_fc2.weight11") == (
        "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
        3,
        11,
    )
    assert split_name("decoder.final_layernorm.weight") == ("decoder.final_layernorm.weight", 0, 0)


@pytest.mark.parametrize("model", [QWEN_1_5B, QWEN_7B])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_real_vocabularies_need_no_padding(model: Architecture, tp: int) -> None:
    assert model.padded_vocab(tp) == model.vocab


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        (QWEN_7B, Degrees(tp=4, pp=5)),
        (QWEN_1_5B, Degrees(tp=4, pp=7)),  # two key/value heads shared by two ranks each
        (MIXTURE, Degrees(tp=4, pp=8, ep=8, etp=1, dp=2)),
        (MIXTURE, Degrees(tp=4, pp=8, ep=8, dp=8)),
    ],
)
def test_degrees_that_people_use_hold_the_models(model: Architecture, degrees: Degrees) -> None:
    model.require(degrees)


def test_every_reason_why_degrees_cannot_hold_a_model_is_named() -> None:
    assert [problem.split(";")[0] for problem in QWEN_7B.problems(Degrees(tp=3, pp=32))] == [
        "parallel.tp=3 does not divide the 28 attention heads",
        "parallel.tp=3 does not divide the 18944 feed-forward columns",
        "parallel.tp=3 neither divides the 4 key/value heads nor is a multiple of them",
        "parallel.pp=32 makes 32 stages of 28 layers and some would be empty",
    ]
    assert [problem.split(";")[0] for problem in MIXTURE.problems(Degrees(ep=5, etp=7, dp=35))] == [
        "parallel.ep=5 does not divide the 128 experts",
        "parallel.etp=7 does not divide the 1536 feed-forward columns of an expert",
    ]
    with pytest.raises(ConfigError, match=r"parallel.ep=2 splits experts and qwen2 models have none"):
        QWEN_7B.require(Degrees(ep=2, dp=2))
