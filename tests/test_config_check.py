"""Checking: values that are wrong by themselves, do not fit each other, or do not fit this machine."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megagent.config_load import load
from megagent.errors import ConfigError, MegagentError
from megagent.model_source import KNOWN, hf_config_of, model_folder
from tests.config_faults import QWEN_7B, only_problem, problems

# --- values by themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("parallel.tp=0", "at least 1"),
        ("trainer.mini_batch_rows=-64", "at least 1"),
        ("env.max_steps=0", "at least 1"),
        ("env.page_size=0", "at least 1"),
        ("env.retries=-1", "at least 0"),
        ("rollout.temperature=0", "at least 0.01"),
        ("trainer.lr=0", "more than 0"),
        ("trainer.lr=nan", "more than 0"),
        ("trainer.clip_grad=inf", "more than 0"),
        ("algo.gamma=1.01", "at least 0 and at most 1"),
        ("algo.clip=1", "more than 0 and less than 1"),
        ("algo.sampler_ratio_max=0.9", "at least 1"),
        ("trainer.adam_beta1=1", "at least 0 and less than 1"),
        ("trainer.test_freq=0", "at least 1"),
        ("rollout.memory_fraction=1.1", "more than 0 and at most 1"),
        ("trainer.val_temperature=-1", "at least 0"),
    ],
)
def test_a_number_out_of_its_range_is_named_with_the_range(override: str, rule: str) -> None:
    key, _, value = override.partition("=")
    found = only_problem(override)
    assert found.startswith(f"{key}=")
    assert found.endswith(f"must be a number, {rule}")
    assert float(found.split("=")[1].split(":")[0]) == pytest.approx(float(value), nan_ok=True)


@pytest.mark.parametrize(
    "override",
    [
        "algo.estimator=gigpoo",
        "algo.norm=none",
        "algo.kl_estimator=k9",
        "algo.baseline=row",
        "algo.loss=trpo",
        "algo.aggregation=mean",
        "algo.kl_in=advantage",
        "algo.sampler_correction=tis",
        "algo.adjust=drop",
        "algo.compat=verl",
        "env.name=webshops",
        "env.prompt=webshop_short",
        "env.compat=original",
        "env.goals=all",
        "env.observation=html",
        "model.dtype=fp16",
        "cluster.platform=tpu",
        "cluster.ray_address=head",
    ],
)
def test_an_unknown_name_is_refused(override: str) -> None:
    assert only_problem(override).startswith(f"{override}: ")


def test_an_unknown_estimator_is_answered_with_the_registered_ones() -> None:
    from megagent.algos.advantages import ESTIMATORS

    found = only_problem("algo.estimator=ppo")
    assert all(name in found for name in ESTIMATORS)


def test_the_estimators_known_without_torch_are_the_registered_ones() -> None:
    from megagent.algos import advantages, choices

    assert tuple(advantages.ESTIMATORS) == choices.ESTIMATORS


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379", "head.cluster:10001"])
def test_ray_addresses_that_ray_understands_are_taken(address: str) -> None:
    assert load([f"cluster.ray_address={address}"]).cluster.ray_address == address


@pytest.mark.parametrize("key", ["model.path", "trainer.run_dir", "experiment_name", "env.catalog"])
def test_an_empty_text_is_refused(key: str) -> None:
    assert f"{key}: must not be empty" in problems(f"{key}=''")


# --- values that must fit each other ---------------------------------------------------------------------------------


def test_the_engine_does_not_sample_groups() -> None:
    assert only_problem("rollout.n=8") == (
        "rollout.n=8: groups are sampled by the environment; set env.rollout.n=8 and leave rollout.n=1"
    )


def test_attention_heads_that_tp_does_not_divide_are_refused_with_the_degrees_that_fit() -> None:
    found = only_problem(QWEN_7B, "parallel=single", "parallel.tp=8", "rollout.tp=1")
    assert "parallel.tp=8 does not divide the 28 attention heads" in found
    assert "Qwen2.5-7B-Instruct: parallel.tp=1, 2 or 4" in found


def test_more_stages_than_layers_are_refused_with_the_degrees_that_fit() -> None:
    found = problems(QWEN_7B, "parallel=pp2", "parallel.pp=32", "rollout.tp=1", "rollout.engines=1")[0]
    assert "parallel.pp=32 makes 32 stages of 28 layers and some would be empty" in found
    assert "27 or 28)" in found


def test_all_that_is_wrong_with_a_layout_is_said_at_once(tmp_path: Path) -> None:
    found = problems(write_mixture(tmp_path), "parallel=single", "parallel.tp=3", "parallel.pp=5", "rollout.tp=1")
    wrong = ("parallel.tp=3 does not divide the 8 attention heads", "parallel.pp=5 makes 5 stages of 4 layers")
    for words in (*wrong, "parallel.tp=3: experts on several tensor ranks"):
        assert any(words in each for each in found), found


def test_degrees_that_contradict_each_other_are_refused() -> None:
    found = problems("parallel=single", "parallel.vpp=2", "parallel.ep=4")
    assert any("parallel.vpp=2 interleaves pipeline stages and parallel.pp=1 has none" in each for each in found)
    assert any("parallel.ep=4 x etp=1 does not divide the tp=1 x dp=1 ranks" in each for each in found)


def test_experts_on_several_tensor_ranks_ask_for_sequence_parallelism(tmp_path: Path) -> None:
    overrides = (write_mixture(tmp_path), "parallel=tp2", "rollout.tp=1", "rollout.engines=1")
    found = only_problem(*overrides)
    assert "parallel.tp=2: experts on several tensor ranks are trained only with sequence parallelism" in found
    assert "set parallel.sequence_parallel=true" in found
    load([*overrides, "parallel.sequence_parallel=true"])


def test_experts_split_otherwise_than_attention_ask_for_expert_parallelism(tmp_path: Path) -> None:
    overrides = [write_mixture(tmp_path), "parallel=tp2", "parallel.sequence_parallel=true", "parallel.etp=1"]
    assert "parallel.etp=1 is not tp=2" in only_problem(*overrides, "rollout.tp=1", "rollout.engines=1")
    load([*overrides, "parallel.ep=2", "rollout.tp=1", "rollout.engines=1"])


def write_mixture(folder: Path) -> str:
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return f"model.path={folder}"


def test_an_engine_whose_tp_does_not_divide_the_heads_is_refused() -> None:
    found = only_problem(QWEN_7B, "rollout.tp=8", "rollout.engines=1")
    assert "rollout.tp=8 does not divide the 28 attention heads" in found


def write_model(folder: Path, **changes: Any) -> str:
    config = {**KNOWN["Qwen/Qwen2.5-0.5B"], "num_attention_heads": 12, "hidden_size": 768, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return f"model.path={folder}"


def test_feed_forward_columns_that_tp_does_not_divide_are_refused(tmp_path: Path) -> None:
    found = problems(write_model(tmp_path, intermediate_size=4863), "parallel=tp2", "rollout.tp=1")
    assert any("parallel.tp=2 does not divide the 4863 feed-forward columns" in each for each in found)


def test_key_value_heads_that_neither_divide_nor_are_divided_are_refused(tmp_path: Path) -> None:
    found = only_problem(
        write_model(tmp_path, num_key_value_heads=4, intermediate_size=4863, vocab_size=192),
        "parallel=single",
        "rollout.tp=3",
        "rollout.engines=1",
        "cluster=cpu",
    )
    assert "rollout.tp=3 neither divides the 4 key/value heads nor is a multiple of them" in found


def test_a_vocabulary_that_an_engine_cannot_share_out_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, num_key_value_heads=3, intermediate_size=4863, vocab_size=100)
    found = only_problem(model, "parallel=single", "rollout.tp=3", "rollout.engines=1", "cluster=cpu")
    assert "rollout.tp=3 does not divide the 128 padded vocabulary entries" in found


def test_a_model_of_no_known_family_is_refused(tmp_path: Path) -> None:
    found = only_problem(write_model(tmp_path, architectures=["MambaForCausalLM"]))
    assert "MambaForCausalLM" in found


def test_prompts_and_responses_longer_than_the_model_are_refused() -> None:
    found = only_problem("rollout.max_prompt_tokens=32768")
    assert "rollout.max_prompt_tokens=32768 + rollout.max_response_tokens=512: Qwen2.5-1.5B-Instruct has 32768" in found


def test_batches_that_cannot_be_cut_into_mini_batches_are_refused() -> None:
    assert any("trainer.mini_batch_rows=4096" in each for each in problems("trainer.mini_batch_rows=4096"))


def test_more_ranks_than_gpus_are_refused() -> None:
    found = only_problem("parallel.dp=8")
    assert "tp 2 x pp 1 x dp 8 = 16 ranks, and cluster.nodes=1 x cluster.gpus_per_node=8 are 8 GPUs" in found


def test_more_engines_than_the_ranks_have_gpus_for_are_refused() -> None:
    assert "rollout: engines 5 x tp 2 = 10 GPUs" in only_problem("rollout.engines=5")


def test_an_engine_larger_than_a_node_is_refused() -> None:
    found = problems(QWEN_7B, "cluster.gpus_per_node=2", "cluster.nodes=4", "rollout.tp=4", "rollout.engines=2")
    assert any(each.startswith("rollout.tp=4: an engine stays on one node") for each in found)


def test_several_nodes_need_a_ray_that_runs_on_them_and_a_shared_folder() -> None:
    found = problems("cluster.nodes=2", "rollout.sync=gather")
    assert [each.split(":")[0] for each in found] == ["cluster.nodes=2", "rollout.sync_dir=/dev/shm"]


def test_only_whole_files_of_weights_need_a_shared_folder() -> None:
    assert [each.split(":")[0] for each in problems("cluster.nodes=2")] == ["cluster.nodes=2"]


def test_engines_on_gpus_of_their_own_need_them_beside_those_of_the_ranks() -> None:
    found = only_problem("rollout.placement=disaggregated", "parallel.dp=4")
    assert "GPUs of their own beside the 8 of the training ranks" in found
    assert load(
        [
            "experiment=webshop_gigpo_7b",
            QWEN_7B,
            "rollout.placement=disaggregated",
            "cluster.nodes=2",
            "cluster.ray_address=host:1234",
        ]
    ).rollout.engines


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("rollout.sync=shared_memory",), "is for cluster.platform=cpu, and it is cuda; use auto, cuda_ipc, gloo or"),
        (
            ("cluster.platform=cpu", "rollout.sync=nccl"),
            "is for cluster.platform=cuda, and it is cpu; use auto, shared",
        ),
        (("rollout.sync=nccl",), "NCCL has one process on a GPU, and with rollout.placement=colocated"),
        (("rollout.sync=rdma",), "use auto, shared_memory, cuda_ipc, gloo, nccl or gather"),
    ],
)
def test_a_transport_of_another_platform_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    assert sentence in only_problem(*overrides)


def test_a_transport_that_ends_at_the_node_is_refused_for_engines_on_others() -> None:
    overrides = ("cluster.nodes=2", "cluster.ray_address=host:1234", "rollout.placement=disaggregated")
    assert "reads memory of its own node" in only_problem(*overrides, "rollout.sync=cuda_ipc")


@pytest.mark.parametrize("key", ["top_p", "top_k", "repetition_penalty"])
def test_sampling_that_the_trainer_cannot_follow_is_refused(key: str) -> None:
    assert "rollouts are sampled from the whole distribution" in only_problem(f"rollout.{key}=0.9")


def test_a_catalogue_that_is_not_there_is_refused(tmp_path: Path) -> None:
    found = only_problem(f"env.catalog={tmp_path / 'no'}")
    assert f"env.catalog={tmp_path / 'no'}: there is no such folder or file" in found


def test_a_catalogue_that_is_neither_folder_nor_file_is_refused() -> None:
    assert "env.catalog=/dev/null: there is no such folder or file" in only_problem("env.catalog=/dev/null")


def test_a_warm_up_longer_than_the_training_is_refused() -> None:
    assert "sft.warmup_steps=50" in only_problem("sft.steps=50")


def test_a_critic_that_learns_alone_to_the_end_is_refused() -> None:
    assert "in none" in only_problem("algo=ppo", "trainer.iterations=7", "critic.warmup_iterations=7")


# --- all at once -----------------------------------------------------------------------------------------------------


def test_faults_of_every_kind_are_reported_together() -> None:
    found = problems(
        "algo.gama=1", "trainer.lr=abc", "env.max_steps=0", "rollout.n=8", "parallel=tp9", "env.name=shop", "x"
    )
    expected = ("algo.gama", "trainer.lr=abc", "env.max_steps=0", "rollout.n=8", "parallel=tp9", "env.name=shop", "x:")
    for beginning in expected:
        assert any(each.startswith(beginning) for each in found), beginning
    assert len(found) == len(expected)


def test_a_faulty_value_causes_no_further_complaints() -> None:
    assert len(problems("parallel.tp=many", "trainer.mini_batch_rows=0")) == 2


def test_the_report_counts_and_lists_the_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["algo.gama=1", "rollout.n=8"])
    assert str(caught.value) == (
        "configs: 2 problems\n"
        "  algo.gama: unknown key (did you mean algo.gamma?)\n"
        "  rollout.n=8: groups are sampled by the environment; set env.rollout.n=8 and leave rollout.n=1"
    )


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, no proxy, and no name that resolves."""

    def refuse(*_: object) -> None:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", sorted(KNOWN))
def test_known_models_are_planned_without_a_network(path: str) -> None:
    load([f"model.path={path}", "parallel=single", "rollout.tp=1", "rollout.engines=1"])


@pytest.mark.usefixtures("offline")
def test_an_unknown_hub_model_without_a_network_is_refused() -> None:
    found = only_problem("model.path=someone/model")
    assert found.startswith("model.path=someone/model: not in the Hugging Face cache")
    assert "hf download someone/model" in found


@pytest.mark.usefixtures("offline")
def test_a_known_model_that_cannot_be_had_is_refused_when_training_starts(tmp_path: Path) -> None:
    found = problems(f"trainer.run_dir={tmp_path / 'run'}", command="train")
    assert any("model.path=Qwen/Qwen2.5-1.5B-Instruct: not in the Hugging Face cache" in each for each in found)


def test_a_cached_config_is_preferred_to_the_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, num_hidden_layers=5)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert hf_config_of("Qwen/Qwen2.5-7B")["num_hidden_layers"] == 5


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("builtin:nothing", "there is no such built-in model"),
        ("/no/such/folder", "there is no such folder; give a Hugging Face model folder"),
        ("./nothing", "there is no such folder"),
        ("nothing", "there is no such folder"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(path: str, sentence: str) -> None:
    assert f"model.path={path}: {sentence}" in only_problem(f"model.path={path}")


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    assert "the folder has no config.json" in only_problem(f"model.path={tmp_path}")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_json_that_is_broken_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "download the model again" in only_problem(f"model.path={tmp_path}")


def test_the_known_configs_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        KNOWN["Qwen/Qwen2.5-7B"]["num_hidden_layers"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("size", "billions"),
    [("0.5B", 0.49), ("1.5B", 1.54), ("3B", 3.09), ("7B", 7.62), ("14B", 14.8), ("32B", 32.8), ("72B", 72.7)],
)
def test_the_known_sizes_add_up_to_the_published_parameter_counts(size: str, billions: float) -> None:
    assert parameters(KNOWN[f"Qwen/Qwen2.5-{size}"]) / 1e9 == pytest.approx(billions, rel=0.01)


def parameters(config: Mapping[str, Any]) -> int:
    hidden, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    key = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * key + hidden + 2 * key
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return embeddings + layers * (attention + 3 * hidden * ffn + 2 * hidden) + hidden


def test_a_local_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_missing_folder_is_named_as_the_value_of_model_path() -> None:
    with pytest.raises(MegagentError, match=r"^model\.path=/no/such: there is no such folder"):
        model_folder("/no/such")


# --- what the start of a command finds -------------------------------------------------------------------------------


def ready(tmp_path: Path) -> list[str]:
    """Overrides of a training that can start: a model with weights, a new run folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = write_model(folder)
    (folder / "model.safetensors").touch()
    return [
        model,
        f"trainer.run_dir={tmp_path / 'run'}",
        f"sft.output={tmp_path / 'sft'}",
        f"rollout.sync_dir={tmp_path}",
    ]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_command_that_finds_everything_starts(tmp_path: Path, command: Any) -> None:
    load(ready(tmp_path), command)


def test_a_folder_that_holds_a_run_is_refused_for_a_new_one(tmp_path: Path) -> None:
    overrides = ready(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert "already holds a run; continue it with trainer.resume=true" in only_problem(*overrides, command="train")


def test_a_folder_that_holds_a_run_can_be_resumed(tmp_path: Path) -> None:
    overrides = ready(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    load([*overrides, "trainer.resume=true"], "train")


def test_a_run_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    overrides = ready(tmp_path)
    (tmp_path / "run").touch()
    assert "is a file; give a folder" in only_problem(*overrides, command="train")


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    overrides = ready(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "has no *.safetensors file" in only_problem(*overrides, command="train")


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("train", ["model.path", "trainer.run_dir"]),
        ("sft", ["model.path", "sft.output"]),
    ],
)
def test_the_home_folder_of_nobody_is_refused(tmp_path: Path, command: Any, keys: list[str]) -> None:
    found = problems(*ready(tmp_path), *(f"{key}='~no-such-user/some/folder'" for key in keys), command=command)
    assert [each.split("=")[0] for each in found] == keys
    assert all("~no-such-user is the home folder of no user here" in each for each in found)


def test_a_sync_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    overrides = [*ready(tmp_path), "rollout.sync=gather", f"rollout.sync_dir={tmp_path / 'no'}"]
    assert "is not a folder that can be written to" in only_problem(*overrides, command="train")


def test_the_warm_start_does_not_write_over_a_model(tmp_path: Path) -> None:
    overrides = ready(tmp_path)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.json").touch()
    assert "exists and is not an empty folder" in only_problem(*overrides, command="sft")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.seed=20240115123", "trainer.seed=20240115123"),
        ("rollout.temperature=0.001", "rollout.temperature=0.001"),
        ("cluster.ray_address=host:70000", "cluster.ray_address=host:70000"),
    ],
)
def test_values_that_would_fail_late_are_refused_early(override: str, sentence: str) -> None:
    assert sentence in only_problem("experiment=webshop_tiny", override)
