from __future__ import annotations

import json

import pytest

from megagent.envs import build_world
from megagent.envs.base import SPLITS, Task
from megagent.envs.webshop.build import build_catalog
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.world import WebShopWorld
from megagent.errors import CatalogError, MegagentError

from .conftest import entry, item
from .shelf import shelf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """120 products in the original's schema; two were asked for by people."""
    folder = tmp_path_factory.mktemp("shop")
    items = [item(f"B{number}") for number in range(120)]
    human = [{"instruction": "i want it small.", "instruction_attributes": ["light"], "instruction_options": ["small"]}]
    (folder / "items_shuffle.json").write_text(json.dumps(items))
    (folder / "items_ins_v2.json").write_text(json.dumps({one["asin"]: entry() for one in items}))
    (folder / "items_human_ins.json").write_text(json.dumps({"B1": human, "B7": human}))
    return folder


def world_of(folder, **fields) -> WebShopWorld:
    return build_world(WebShopConfig(catalog=str(folder), **fields))


def test_a_built_file_and_its_folder_make_the_same_world(folder, tmp_path):
    path = build_catalog(folder, tmp_path / "some.shop").path
    built, read = world_of(path), world_of(folder)
    assert built.digest == read.digest
    assert [list(built.tasks(split)) for split in SPLITS] == [list(read.tasks(split)) for split in SPLITS]


def test_the_digest_tells_goals_rules_and_products_apart(folder):
    worlds = [{}, {"goals": "human"}, {"compat": "verl_agent"}, {"catalog": "embedded"}]
    digests = [build_world(WebShopConfig(**{"catalog": str(folder), **fields})).digest for fields in worlds]
    assert len(set(digests)) == len(digests)


def test_the_digest_does_not_depend_on_how_pages_look(folder):
    assert world_of(folder).digest == world_of(folder, page_size=3, observation="text_rich").digest


def test_a_price_more_is_another_digest():
    config = WebShopConfig(catalog="test")
    one, other = (WebShopWorld(config, shelf(30, prices=(price,))) for price in (10.5, 11.5))
    assert one.digest != other.digest


def test_human_goals_come_from_people(folder):
    world = world_of(folder, goals="human")
    tasks = [task for split in ("warmup", "train", "validation", "test") for task in world._source.tasks(split)]
    assert sorted(task.key for task in tasks) == ['["B1", "i want it small."]', '["B7", "i want it small."]']


def test_a_catalogue_without_goals_of_the_kind_is_refused_before_anything_starts():
    with pytest.raises(
        CatalogError, match="env.catalog=embedded: no goals can be made of its products for env.goals=h"
    ):
        build_world(WebShopConfig(goals="human"))


def test_an_empty_panel_says_how_many_goals_there_are(folder):
    world = world_of(folder, goals="human")
    empty = next(split for split in SPLITS if not world._source.tasks(split))
    for ask in (lambda: world.tasks(empty), lambda: world.draw(empty, 1, 0, 1)):
        with pytest.raises(CatalogError, match=f"no goal falls in the {empty} panel, and all panels hold 2 goals"):
            ask()


def test_panels_that_share_their_goals_count_them_once(folder):
    world = world_of(folder, goals="human", compat="verl_agent")
    with pytest.raises(CatalogError, match="no goal falls in the train panel, and all panels hold 2 goals together"):
        world.tasks("train")


def test_an_unknown_panel_is_an_error(world):
    with pytest.raises(MegagentError, match="no panel 'dev'; use one of warmup, train, validation, test"):
        world.tasks("dev")


def test_a_task_of_another_catalogue_is_an_error(world, folder):
    with pytest.raises(MegagentError, match="is not one of env.catalog=embedded; use the env.catalog, env.goals and"):
        world.goal(world_of(folder).tasks("train")[0])


def test_a_task_of_the_other_behaviour_is_an_error(world):
    compat = build_world(WebShopConfig(compat="verl_agent"))
    for own, other in ((world, compat), (compat, world)):
        with pytest.raises(MegagentError, match="is not one of env.catalog=embedded"):
            own.goal(other.tasks("train")[0])
    with pytest.raises(MegagentError, match="is not one of"):
        compat.goal(Task("verl-agent-0-0", "train", "[]"))


def test_the_originals_panels_are_the_head_and_the_rest_of_its_lists():
    compat = build_world(WebShopConfig(compat="verl_agent"))
    assert {split: len(compat.tasks(split)) for split in SPLITS} == {
        "warmup": 220,
        "train": 220,
        "validation": 500,
        "test": 500,
    }
    assert compat.tasks("validation")[0].uid == "verl-agent-1000-0"
    assert compat.tasks("train")[0].uid == "verl-agent-0-500"
    assert compat.goal(compat.tasks("train")[5]).text == compat.goal_list(0)[505].text


def test_prices_are_those_of_the_seed_that_drew_the_goal(folder):
    compat = WebShopWorld(WebShopConfig(catalog="test", compat="verl_agent"), shelf(100, prices=(5.0, 95.0)))
    one, other = (compat.goal(task) for task in compat.draw("train", 2, seed=0, iteration=1))
    assert (one.price_seed, other.price_seed) == (0, 1)
    assert compat.shop.price(0, one) != compat.shop.price(0, other)


def test_goal_lists_by_seed_are_the_originals_only(world):
    with pytest.raises(MegagentError, match="only env.compat=verl_agent has goal lists by seed"):
        world.goal_list(0)
