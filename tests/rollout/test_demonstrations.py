"""Scripted episodes as rows for supervised training."""

from __future__ import annotations

import re

import pytest
import torch

from megagent.config import Config, RolloutConfig, SftConfig
from megagent.envs import build_world
from megagent.envs.webshop.config import WebShopConfig
from megagent.rollout import demonstrations
from megagent.rollout.demonstrations import lessons, reply, supervised_batches, supervised_rows
from megagent.rollout.projection import project
from megagent.rollout.prompts import PromptBuilder

END = 0


class Bytes:
    """One token for each byte, after the end token."""

    chat_template = None
    eos_token_id = END

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(token - 1 for token in ids).decode()


@pytest.fixture(scope="module")
def config() -> Config:
    return Config(
        env=WebShopConfig(prompt="webshop_compact", page_size=4, max_steps=8),
        rollout=RolloutConfig(max_prompt_tokens=1000),
        sft=SftConfig(episodes=12, steps=10, batch_rows=4, prompt_weight=0.25, short_prompt_fraction=0.6),
    )


@pytest.fixture(scope="module")
def world(config):
    return build_world(config.env)


@pytest.fixture(scope="module")
def made(config, world):
    return lessons(config, world, seed=3)


def rows_of(made, config, with_history=True):
    builder = PromptBuilder(config.env, config.rollout, Bytes())
    return supervised_rows(made, builder, Bytes(), config.sft.prompt_weight, with_history)


def test_every_reply_projects_to_a_valid_action(made):
    assert all(project(lesson.reply, lesson.observation.admissible).valid for lesson in made)


def test_a_reply_is_a_thought_and_an_action():
    assert reply("need red", "click[red]") == "<think>need red</think><action>click[red]</action>"


def test_only_tasks_of_the_warm_up_panel_are_shown(config, world, made):
    held_back = set()
    for split in ("train", "validation", "test"):
        held_back |= {world.make().reset(task).task for task in world.tasks(split)}
    wordings = {world.make().reset(task).task for task in world.tasks("warmup")}
    shown = {lesson.observation.task for lesson in made}
    assert shown <= wordings
    assert not (shown & held_back - wordings)


def bought(made) -> dict[str, set[str]]:
    """Product ids that were clicked, by the task."""
    clicks: dict[str, set[str]] = {}
    for lesson in made:
        found = re.search(r"click\[(b[0-9]+)\]", lesson.reply)
        if found:
            clicks.setdefault(lesson.observation.task, set()).add(found[1])
    return clicks


def test_in_some_episodes_products_have_swapped_ids(config, world, monkeypatch):
    swapped = bought(lessons(config, world, seed=3))
    monkeypatch.setattr(demonstrations, "SWAPPED", 0.0)
    plain = bought(lessons(config, world, seed=3))
    differing = [task for task in plain if plain[task] != swapped[task]]
    assert 0 < len(differing) < len(plain)


def test_swapped_ids_are_the_same_in_page_actions_and_history(made):
    for lesson in made:
        on_page = {found.lower() for found in re.findall(r"B[0-9]+", lesson.observation.page)}
        offered = {found for action in lesson.observation.admissible for found in re.findall(r"b[0-9]+", action)}
        assert on_page == offered
        for step in lesson.history.last():
            clicked = re.search(r"click\[(b[0-9]+)\]", step.action)
            assert not clicked or clicked[1].upper() in step.page


def test_responses_end_with_the_end_token_and_hold_the_reply(config, made):
    rows = rows_of(made, config)
    for lesson, response in zip(made, rows["responses"].rows(), strict=True):
        assert response[-1] == END
        assert Bytes().decode(response[:-1].tolist()) == lesson.reply


def test_loss_weights_are_the_prompt_weight_then_one(config, made):
    rows = rows_of(made, config)
    for prompt, response, weights in zip(
        rows["prompts"].rows(), rows["responses"].rows(), rows["loss_weights"].rows(), strict=True
    ):
        assert weights.tolist() == [0.25] * len(prompt) + [1.0] * len(response)


def test_prompts_without_history_are_those_of_a_first_step(config, made):
    short, full = rows_of(made, config, with_history=False), rows_of(made, config)
    later = torch.tensor([bool(lesson.history.last()) for lesson in made])
    assert (short["prompts"].lengths[later] < full["prompts"].lengths[later]).all()
    assert torch.equal(short["prompts"].lengths[~later], full["prompts"].lengths[~later])


def test_the_same_seed_gives_the_same_batches(config, world):
    one, two = (list(supervised_batches(config, world, Bytes(), seed=5)) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first["prompts"].values, second["prompts"].values)
        assert torch.equal(first["responses"].values, second["responses"].values)


def test_another_seed_gives_other_batches(config, world):
    one, two = (next(supervised_batches(config, world, Bytes(), seed=seed)) for seed in (5, 6))
    assert one["prompts"].values.tolist() != two["prompts"].values.tolist()


def test_there_are_as_many_batches_of_as_many_rows_as_asked_for(config, world):
    assert [len(batch) for batch in supervised_batches(config, world, Bytes(), seed=0)] == [4] * 10


def test_the_first_batches_show_no_history(config, world):
    past_action = re.compile(r"\n(search\[[a-z]|click\[b[0-9])")  # at the start of a line, as in a history
    shown = [
        any(past_action.search(Bytes().decode(row.tolist())) for row in batch["prompts"].rows())
        for batch in supervised_batches(config, world, Bytes(), seed=0)
    ]
    assert not any(shown[:6])
    assert any(shown[6:])
