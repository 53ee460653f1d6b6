"""Loading: what Hydra composes is typed by the schema, and every fault is reported, all of them at once."""

from __future__ import annotations

import dataclasses
import json
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megagent.config import Config, as_yaml
from megagent.config_check import RANGES, values
from megagent.config_load import configs_dir, load, read, schema_keys
from megagent.envs import WORLDS
from megagent.envs.sokoban import SokobanConfig
from megagent.envs.webshop.config import WebShopConfig
from megagent.errors import ConfigError, MegagentError
from megagent.model_source import KNOWN, hf_config_of, model_folder

QWEN_7B = "model.path=Qwen/Qwen2.5-7B-Instruct"


def problems(*overrides: str, command: Any = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides), command)
    return caught.value.problems


def only_problem(*overrides: str, command: Any = None) -> str:
    found = problems(*overrides, command=command)
    assert len(found) == 1, found
    return found[0]


# --- what loads ------------------------------------------------------------------------------------------------------


def test_without_overrides_the_seed_recipe_is_loaded() -> None:
    config = load([])
    recipe = Config()
    assert config.experiment_name == "webshop_gigpo"
    assert (config.algo, config.trainer.lr, config.env.rollout.n) == (recipe.algo, recipe.trainer.lr, 8)
    assert config.model.path == "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (configs_dir() / "experiment").glob("*.yaml")))
def test_every_experiment_loads_without_a_fault(experiment: str) -> None:
    assert load([f"experiment={experiment}"]).experiment_name == experiment


def test_every_choice_of_every_group_has_known_keys_and_right_types() -> None:
    groups = {folder.name: sorted(folder.glob("*.yaml")) for folder in configs_dir().iterdir() if folder.is_dir()}
    for index in range(max(len(files) for files in groups.values())):
        choices = [f"{group}={files[index % len(files)].stem}" for group, files in groups.items()]
        _, faults = read(choices)
        assert faults.texts == [], choices


def test_the_tiny_experiment_is_the_demo_recipe() -> None:
    config = load(["experiment=webshop_tiny"])
    assert config.model.path == "builtin:webshop_tiny"
    assert (config.parallel.tp, config.parallel.pp, config.parallel.dp) == (2, 1, 1)
    assert (config.trainer.tasks_per_iteration, config.env.rollout.n, config.env.max_steps) == (12, 8, 8)
    assert config.trainer.run_dir == "runs/webshop_tiny"


def test_the_7b_experiment_is_tp4_pp2_with_engines_of_tp4() -> None:
    config = load(["experiment=webshop_gigpo_7b"])
    assert (config.parallel.tp, config.parallel.pp, config.rollout.tp) == (4, 2, 4)


def test_a_choice_on_the_command_line_wins_over_the_experiment() -> None:
    parallel = load(["parallel=dp2", "experiment=webshop_tiny", "model=qwen2_5_0_5b"]).parallel
    assert (parallel.tp, parallel.dp) == (1, 2)


def test_a_value_on_the_command_line_wins_over_every_file() -> None:
    assert load(["rollout.tp=2", "experiment=webshop_tiny", "model=qwen2_5_0_5b"]).rollout.tp == 2


def test_of_two_values_for_one_key_the_last_wins() -> None:
    assert load(["trainer.seed=1", "trainer.seed=2"]).trainer.seed == 2


def test_a_mapping_is_merged_into_its_section() -> None:
    env = load(["env.rollout={n: 4}"]).env
    assert (env.rollout.n, env.max_steps) == (4, 15)


def test_one_key_may_refer_to_another() -> None:
    assert load(["trainer.run_dir=/scratch/${experiment_name}"]).trainer.run_dir == "/scratch/webshop_gigpo"


def test_values_have_the_types_of_the_schema() -> None:
    kinds = dict(schema_keys(WebShopConfig))
    for key, value in values(load(["trainer.lr=1", "experiment_name=7"])):
        assert type(value) is kinds[key], key


def test_the_resolved_yaml_loads_to_the_same_values() -> None:
    from omegaconf import OmegaConf

    config = load(["experiment=webshop_gigpo_7b"])
    schema = OmegaConf.structured(Config(env=WebShopConfig()))
    assert OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.create(as_yaml(config)))) == config


def test_every_number_of_the_schema_has_a_range() -> None:
    numbers = [key for key, kind in schema_keys() if kind in (int, float)]
    assert sorted(numbers) == sorted(RANGES)


@pytest.mark.parametrize("name", WORLDS)
def test_every_number_that_an_environment_adds_has_a_range(name: str) -> None:
    common = {key for key, _ in schema_keys()}
    fields = {f"env.{item.name}": item for item in dataclasses.fields(WORLDS[name].config)}
    own = [key for key, kind in schema_keys(WORLDS[name].config) if key not in common and kind in (int, float)]
    assert [key for key in own if "range" not in fields[key].metadata] == []


def test_an_environment_has_its_own_keys() -> None:
    env = load(["env=sokoban", "env.boxes=2"]).env
    assert isinstance(env, SokobanConfig)
    assert (env.name, env.boxes, env.rollout.n) == ("sokoban", 2, 8)


def test_the_keys_of_another_environment_are_refused() -> None:
    assert only_problem("env=sokoban", "env.page_size=4") == (
        "env.page_size: not a key of this environment but of webshop; choose it with env=<file of configs/env>"
    )


def test_a_mistyped_environment_causes_no_complaints_about_its_keys() -> None:
    assert only_problem("env=sokoban", "env.name=sokobam", "env.boxes=2").startswith("env.name=sokobam: ")


def test_an_environment_is_not_chosen_by_its_name_alone() -> None:
    assert only_problem("experiment=webshop_tiny", "env.name=sokoban") == (
        "env.name=sokoban: the other keys of env would still be those of webshop; use env=sokoban"
    )
    assert load(["env=sokoban", "env.name=sokoban"]).env.name == "sokoban"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("env.moves=20", "env.moves=20: an episode ends after env.max_steps=15"),
        ("env.boxes=6", "env.boxes=6: too many for a room of env.size=6"),
        ("env.size=4", "env.size=4: must be a number, at least 5 and at most 20"),
    ],
)
def test_values_of_an_environment_must_fit_each_other(override: str, sentence: str) -> None:
    assert sentence in only_problem("env=sokoban", override)


# --- faults of form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algo.gama=1", "algo.gama: unknown key (did you mean algo.gamma?)"),
        ("gamma=0.9", "gamma: unknown key (did you mean algo.gamma?)"),
        ("actor.optim.lr=1e-5", "actor.optim.lr: unknown key (did you mean trainer.lr or sft.lr?)"),
        ("+algo.xyzzy=1", "algo.xyzzy: unknown key"),
        ("hydra.run.dir=x", "hydra.run.dir: unknown key"),
        ("trainer.lr=abc", "trainer.lr=abc: must be a number"),
        ("trainer.epochs=1.5", "trainer.epochs=1.5: must be a whole number"),
        ("trainer.epochs=true", "trainer.epochs=true: must be a whole number"),
        ("trainer.epochs=null", "trainer.epochs=null: must be a whole number"),
        ("trainer.resume=perhaps", "trainer.resume=perhaps: must be true or false"),
        ("trainer.run_dir=[a]", "trainer.run_dir=['a']: must be text"),
        ("env.rollout=3", "env.rollout=3: env.rollout is a section; set its keys (env.rollout.n, ...)"),
        ("trainer.seed.x=3", "trainer.seed={'x': 3}: must be a whole number"),
        ("parallel=tp9", "parallel=tp9: configs/parallel has no such choice"),
        ("experiment=webshop_tini", "it has sokoban_tiny, webshop_gigpo, webshop_gigpo_7b, webshop_tiny"),
        ("experiment=webshop_tini", "(did you mean webshop_tiny?)"),
        ("trainer={lr: 3}", "trainer={'lr': 3}: configs/trainer has no such choice"),
        ("rollout.tp=1,2", "rollout.tp=1,2: several values, but a run has one configuration"),
        ("~algo.gamma", "~algo.gamma: a key cannot be removed"),
        ("trainer.lr", "trainer.lr: not an override; write key=value"),
        ("trainer.run_dir=a b=c", "trainer.run_dir=a b=c: not an override"),
        ("trainer.lr=${trainer.lrr}", "trainer.lr=${trainer.lrr}: cannot be resolved to a number"),
        ("trainer.lr=${model.path}", "trainer.lr=${model.path}: cannot be resolved to a number"),
    ],
)
def test_an_override_that_cannot_be_read_is_named_with_the_way_out(override: str, sentence: str) -> None:
    assert sentence in only_problem(override)


def test_a_file_with_an_unknown_key_is_reported_like_an_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("algo:\n  gama: 1\ntrainer:\n  lr: fast\n")
    monkeypatch.setattr("megagent.config_load.configs_dir", lambda: tmp_path)
    found = problems(QWEN_7B)
    assert found == ("algo.gama: unknown key (did you mean algo.gamma?)", "trainer.lr=fast: must be a number")


def test_a_file_that_is_not_yaml_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("algo: [")
    monkeypatch.setattr("megagent.config_load.configs_dir", lambda: tmp_path)
    assert "configs/ cannot be composed" in problems(QWEN_7B)[0]


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
    found = problems(
        write_model(tmp_path, num_key_value_heads=4, intermediate_size=4863),
        "parallel=single",
        "rollout.tp=3",
        "rollout.engines=1",
        "cluster=cpu",
    )
    assert any("rollout.tp=3 neither divides the 4 key/value heads nor is a multiple of them" in each for each in found)


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
