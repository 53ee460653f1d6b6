from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from megagent.envs.webshop.rules import HONEST
from megagent.envs.webshop.shopper import PERFECT, Mistakes, demonstrations, first_hit, named_in

from .visits import visit


def shopped(world, episodes=400, mistakes=None, seed=0, split="warmup"):
    return list(demonstrations(world, world.tasks(split), episodes, mistakes or Mistakes(), max_steps=8, seed=seed))


def test_the_same_seed_gives_the_same_episodes_and_another_seed_others(world):
    assert shopped(world, 50) == shopped(world, 50)
    assert shopped(world, 50) != shopped(world, 50, seed=1)


def test_mistakes_leave_a_minority_of_the_episodes_won(world):
    won = sum(episode.won for episode in shopped(world))
    assert 0.10 < won / 400 < 0.35


def test_every_action_of_a_shopper_is_admissible(world):
    for episode in shopped(world, 100):
        for step in episode.steps:
            if not step.action.startswith("search["):
                assert step.action in step.observation.admissible
            else:
                assert "search[<your query>]" in step.observation.admissible


def test_the_history_holds_every_earlier_page_and_action(world):
    for episode in shopped(world, 20):
        past = tuple((step.observation.page, step.action) for step in episode.steps)
        assert all(step.history == past[:number] for number, step in enumerate(episode.steps))


def test_thoughts_restate_the_task_in_its_own_words_also_when_the_action_is_wrong(world):
    for episode in shopped(world, 100):
        for step in episode.steps[:-1]:
            need = step.think.removeprefix("need ")
            assert all(part in step.observation.task for part in need.split(", "))


def test_a_wrong_query_is_noticed_and_put_right(world):
    episodes = shopped(world, 60, Mistakes(item=0.0, option=0.0, query=1.0))
    assert all(episode.won for episode in episodes)
    # 5 where the wrong query happens to show the right product, 7 with the way back and another search.
    assert {len(episode.steps) for episode in episodes} == {5, 7}


def test_a_wrong_option_alone_loses_the_episode(world):
    assert not any(episode.won for episode in shopped(world, 60, Mistakes(item=0.0, option=1.0, query=0.0)))


def test_tasks_are_used_about_equally_often(world):
    tasks = world.tasks("warmup")
    uids = [episode.task.uid for episode in shopped(world, 2 * len(tasks), PERFECT)]
    assert all(uids.count(task.uid) == 2 for task in tasks)


def test_the_first_hit_is_opened_what_the_task_names_is_selected_and_bought(world):
    tasks = world.tasks("test")[:40]
    environment = world.make()
    for task in tasks:
        result = first_hit(environment, task)
        assert result.done
        assert environment.session.chosen == dict(world.goal(task).options)


def test_a_shopper_that_finds_nothing_buys_nothing(world, monkeypatch):
    monkeypatch.setattr(world.shop, "index", SimpleNamespace(search=lambda query, most: []))
    result = first_hit(world.make(), world.tasks("test")[0])
    assert (result.done, result.score) == (False, 0.0)


def test_of_the_values_that_a_task_names_the_longest_is_meant():
    options = {"size": ("9", "9 wide"), "color": ("red",), "fit": ("slim",)}
    product = replace(visit().goal.product, options=options)
    assert named_in("shoes with size: 9 Wide, and color: red", product, HONEST) == ["9 wide", "red"]
