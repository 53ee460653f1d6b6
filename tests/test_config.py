"""Loading: what Hydra composes is typed by the schema, and every fault is reported, all of them at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megagent.config import Config, as_yaml
from megagent.config_check import RANGES, values
from megagent.config_load import configs_dir, load, read, schema_keys
from megagent.envs import WORLDS
from megagent.envs.sokoban import SokobanConfig
from megagent.envs.webshop.config import WebShopConfig
from tests.config_faults import QWEN_7B, only_problem, problems

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
