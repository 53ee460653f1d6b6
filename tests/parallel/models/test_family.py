"""config.json both ways: what families read, write and refuse. Each fault in words, all faults together."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from megagent.errors import ConfigError
from megagent.model_source import ASSETS, KNOWN
from megagent.parallel.models import FAMILIES, architecture_of, family_of, hf_config_of
from megagent.parallel.models.architecture import Experts, Rope
from megagent.parallel.models.family import Family
from tests.parallel.models.configs import PARAMETERS, REAL, TINY

LLAMA3 = TINY["llama"]["rope_scaling"]
QWEN_1_5B, QWEN_7B = REAL["Qwen/Qwen2.5-1.5B"], REAL["Qwen/Qwen2.5-7B"]


@pytest.mark.parametrize("name", REAL)
def test_real_models_have_their_published_number_of_parameters(name: str) -> None:
    shapes = architecture_of(REAL[name]).hf_shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == PARAMETERS[name]


@pytest.mark.parametrize("config", [*REAL.values(), *TINY.values()], ids=[*REAL, *TINY])
def test_a_config_written_is_read_as_the_same_model(config: dict[str, Any]) -> None:
    model = architecture_of(config)
    assert architecture_of(json.loads(json.dumps(hf_config_of(model)))) == model


@pytest.mark.parametrize("config", TINY.values(), ids=TINY)
def test_transformers_reads_a_config_written_as_the_same_model(config: dict[str, Any]) -> None:
    from transformers import AutoConfig

    model = architecture_of(config)
    written = hf_config_of(model)
    read = AutoConfig.for_model(**written)
    rewritten = {**json.loads(read.to_json_string()), "architectures": written["architectures"]}
    assert architecture_of(rewritten) == model


@pytest.mark.parametrize("name", KNOWN)
def test_the_models_that_can_be_planned_offline_are_understood(name: str) -> None:
    assert architecture_of(KNOWN[name]).family == "qwen2"


def test_the_built_in_models_are_understood() -> None:
    for path in ASSETS.glob("*/config.json"):
        assert architecture_of(json.loads(path.read_text(encoding="utf-8"))).layers > 0


def test_maths_of_the_real_models_is_read() -> None:
    qwen, llama, mixture = (
        architecture_of(REAL[name]) for name in ("Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-235B-A22B")
    )
    assert (qwen.qk_norm, qwen.qkv_bias, qwen.head_dim, qwen.hidden // qwen.heads) == (True, False, 128, 80)
    assert llama.rope == Rope(500000.0, 8.0)
    assert llama.gpt_kwargs(1)["rope_scaling_factor"] == 8.0
    assert mixture.experts == Experts(128, 8, 1536, renormalised=True)
    assert architecture_of(QWEN_7B).qkv_bias


@pytest.mark.parametrize(("renormalised", "pre_softmax"), [(True, False), (False, True)])
def test_router_weights_that_are_not_renormalised_are_softmaxed_over_all_experts(
    renormalised: bool, pre_softmax: bool
) -> None:
    model = architecture_of({**TINY["qwen3_moe"], "norm_topk_prob": renormalised})
    assert model.transformer_kwargs()["moe_router_pre_softmax"] is pre_softmax


def test_the_load_balancing_loss_counts_only_where_transformers_computes_it() -> None:
    config = {**TINY["mixtral"], "router_aux_loss_coef": 0.02}
    for computed, coefficient in ((False, 0.0), (True, 0.02)):
        kwargs = architecture_of({**config, "output_router_logits": computed}).transformer_kwargs()
        assert kwargs["moe_aux_loss_coeff"] == coefficient
        assert kwargs["moe_router_load_balancing_type"] == ("aux_loss" if computed else "none")


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 5e5}, {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_rotary_base_is_read_in_both_spellings(rope: dict[str, Any]) -> None:
    assert architecture_of({**TINY["qwen2"], **rope}).gpt_kwargs(1)["rotary_base"] == 5e5


def test_the_number_of_experts_is_read_in_both_spellings() -> None:
    config = {**TINY["qwen3_moe"], "num_local_experts": 4}
    config.pop("num_experts")
    assert architecture_of(config) == architecture_of(TINY["qwen3_moe"])


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen2", {"hidden_size": None}, "hidden_size is missing"),
        ("qwen2", {"num_hidden_layers": 2.5}, "num_hidden_layers=2.5: a whole number"),
        ("qwen2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': true or false"),
        ("qwen2", {"model_type": "llama"}, "model_type='llama'"),
        ("qwen2", {"hidden_act": "gelu"}, "only silu"),
        ("qwen2", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen2", {"num_key_value_heads": 3}, "does not divide num_attention_heads"),
        ("qwen2", {"hidden_size": 9}, "does not divide hidden_size"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window=32 is smaller"),
        (
            "qwen2",
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "sliding_window": 8},
            "sliding_window=8",
        ),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type yarn is not supported"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope type linear"),
        ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "beta_fast": 32}}, "rope parameters beta_fast"),
        ("qwen2", {"rope_theta": float("nan")}, "rope_theta=nan: a number above 0"),
        ("qwen2", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: a number of at least 0"),
        ("qwen2", {"layer_types": 5}, "layer_types=5: a list of"),
        ("qwen2", {"layer_types": ["full_attention"]}, "a list of"),
        ("qwen2", {"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ("qwen2", {"auto_map": {"AutoModel": "modeling.Mine"}}, "code of its own"),
        ("qwen2", {"logit_softcap": 30.0}, "logit_softcap=30.0: not known of qwen2 models"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"attention_bias": True}, "attention_bias=True and mlp_bias=False"),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor=2.0: Megatron computes"),
        ("llama", {"rope_scaling": {**LLAMA3, "factor": None}}, "factor=None: a number of at least 1"),
        ("mistral", {"sliding_window": 32}, "sliding_window=32 is smaller than max_position_embeddings=64"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "experts in every layer"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "experts in every layer"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "more than the 4 experts"),
        ("mixtral", {"num_experts_per_tok": 1}, "weight is always 1"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ],
)
def test_what_a_family_cannot_express_is_an_error(family: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        architecture_of({**TINY[family], **change})
    assert len(caught.value.problems) == 1, caught.value
    assert words in str(caught.value)


def test_all_faults_of_a_config_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        architecture_of({**TINY["qwen2"], "hidden_act": "relu", "vocab_size": None, "residual_multiplier": 0.2})
    assert [problem.split("=")[0].split(" ")[0] for problem in caught.value.problems] == [
        "hidden_act",
        "vocab_size",
        "residual_multiplier",
    ]


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
        ("qwen2", {"quantization_config": None, "logit_softcap": None}),
        ("qwen2", {"torch_dtype": "bfloat16", "dtype": "bfloat16", "use_cache": False, "bos_token_id": 3}),
    ],
)
def test_what_takes_no_effect_is_no_error(family: str, change: dict[str, Any]) -> None:
    assert architecture_of({**TINY[family], **change}) == architecture_of(TINY[family])


def test_a_mistral_config_without_a_window_has_transformers_default_one() -> None:
    config = {**TINY["mistral"], "max_position_embeddings": 8192}
    assert architecture_of(config).positions == 8192
    config.pop("sliding_window")
    with pytest.raises(ConfigError, match="sliding_window=4096 is smaller"):
        architecture_of(config)


@pytest.mark.parametrize(
    "named", [["GPT2LMHeadModel"], [], None, 5, [5], "GPT2LMHeadModel", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]]
)
def test_unknown_architectures_are_answered_with_the_known_ones(named: Any) -> None:
    with pytest.raises(ConfigError, match=r"use one of: Qwen2ForCausalLM, Qwen3ForCausalLM"):
        family_of({"architectures": named})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tables_are_immutable(family: Family) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.tensors[0].at = "last"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        family.defaults["num_key_value_heads"] = 1  # type: ignore[index]


def test_making_one_model_leaves_no_trace_in_another() -> None:
    """A table at class level that one model wrote to was read by the next."""
    before = architecture_of(TINY["llama"]).hf_shapes()
    architecture_of({**TINY["llama"], "num_hidden_layers": 9, "attention_bias": True, "mlp_bias": True}).hf_shapes()
    assert architecture_of(TINY["llama"]).hf_shapes() == before


def test_a_rotary_base_of_null_is_the_familys_default() -> None:
    assert architecture_of({**TINY["mixtral"], "rope_theta": None}).rope.theta == 1e6
