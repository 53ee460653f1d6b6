from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from megagent.envs.base import SPLITS, Task
from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.product import HumanInstruction
from megagent.envs.webshop.tasks import HumanGoals, SyntheticGoals, uid_of
from megagent.envs.webshop.world import WebShopWorld
from megagent.errors import CatalogError

from .shelf import shelf


def world_over(catalog, **fields) -> WebShopWorld:
    return WebShopWorld(WebShopConfig(catalog="test", **fields), catalog)


def test_panels_hold_every_goal_once_and_share_no_product():
    world = world_over(shelf(200))
    tasks = {split: list(world.tasks(split)) for split in SPLITS}
    assert len({task.uid for panel in tasks.values() for task in panel}) == sum(map(len, tasks.values())) == 1200
    asins = {split: {world.goal(task).product.asin for task in panel} for split, panel in tasks.items()}
    for one, other in combinations(SPLITS, 2):
        assert not asins[one] & asins[other]


def test_a_task_names_its_panel_and_its_goal_in_words():
    world = world_over(shelf(50))
    task = world.tasks("train")[0]
    goal = world.goal(task)
    (_, color), (_, size) = goal.options
    assert task.split == "train"
    assert task.key == f'["{goal.product.asin}", ["color", "{color}"], ["size", "{size}"]]'


def test_a_panel_slices_like_a_list():
    tasks = world_over(shelf(50)).tasks("train")
    assert tasks[3:9:2] == [tasks[3], tasks[5], tasks[7]]
    assert tasks[-1] == list(tasks)[-1]
    with pytest.raises(IndexError):
        tasks[len(tasks)]


def test_a_world_over_millions_of_goals_decodes_only_what_is_asked_for(monkeypatch):
    options = {name: tuple(str(number) for number in range(100)) for name in ("a", "b")}
    catalog = shelf(300, options=options)
    decoded = []
    monkeypatch.setattr(
        catalog, "_decoded", lambda position, read=catalog._decoded: decoded.append(position) or read(position)
    )
    world = world_over(catalog)
    assert sum(len(world.tasks(split)) for split in SPLITS) == 3_000_000
    before = len(decoded)
    world.goal(world.tasks("train")[1_000_000])
    assert before < 200
    assert len(decoded) - before <= 2


@pytest.mark.parametrize(
    "key",
    [
        "no json",
        "[]",
        '["B0"]',
        '["B99", ["color", "red"], ["size", "s"]]',
        '["B0", ["color", "red"], ["size", "xxl"]]',
        '["B0", ["size", "s"], ["color", "red"]]',
        '["B0", ["color", ["red"]], ["size", "s"]]',
        '["B0", 1, 2]',
        '[{"B0": 1}]',
    ],
)
def test_a_key_that_names_no_goal_finds_none(key):
    assert SyntheticGoals(shelf(2)).find(key) is None
    assert HumanGoals(shelf(2)).find(key) is None


def test_a_task_whose_uid_is_not_of_its_key_is_of_no_panel():
    world = world_over(shelf(50))
    task = world.tasks("train")[0]
    assert world._source.find(replace(task, uid="webshop-0")) is None
    assert world._source.find(Task(uid_of(task.key), "train", task.key)) is not None


def test_human_goals_ask_for_values_by_the_name_of_their_option():
    human = (HumanInstruction("a purple one", ("light",), ("purple",)), HumanInstruction("red", ("light",), ("red",)))
    catalog = shelf(30, human=human)
    book = HumanGoals(catalog)
    assert book.counts.tolist() == [1] * 30
    goal = book.goal(4, 0)
    assert (goal.words, goal.options) == ("red", (("color", "red"),))
    assert book.find(book.key(goal)) == goal
    assert book.find('["B4", "a purple one"]') is None


@pytest.mark.parametrize(("compat", "goals"), [("none", "synthetic"), ("none", "human"), ("verl_agent", "human")])
def test_a_count_of_goals_that_was_changed_is_told(compat, goals):
    people = (HumanInstruction("Small.", ("light",), ("s",)),)
    catalog = shelf(600, options={"size": ("s",)}, human=people)
    array = f"goals/{goals}_all" if compat == "verl_agent" else f"goals/{goals}"
    changed = Catalog({**catalog.arrays, array: catalog.arrays[array] + np.uint32(1)}, catalog.meta, "test")
    with pytest.raises(CatalogError, match="counts of goals are damaged"):
        list(world_over(changed, compat=compat, goals=goals).tasks("train"))


def test_values_listed_twice_make_one_goal():
    world = world_over(shelf(40, options={"size": ("s", "m", "s")}))
    assert sum(len(world.tasks(split)) for split in SPLITS) == 80
