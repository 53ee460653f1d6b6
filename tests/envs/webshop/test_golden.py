"""Against the outputs of the original code on 1,000 real products, where these are at hand.

Everything goes the way of users: the folder is built into a .shop file, and the world over it is made by name. Only the
title nouns are the original's: its tagger found them, and they may be given beside the products.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from megagent.envs import build_world
from megagent.envs.base import SPLITS
from megagent.envs.webshop.build import build_catalog
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.nouns import title_nouns
from megagent.envs.webshop.reward import purchase_reward
from megagent.envs.webshop.rules import HONEST, ORIGINAL
from megagent.envs.webshop.session import Session


def read(data, name):
    path = data.parent / "golden" / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()


def lines(data, name):
    return [json.loads(line) for line in read(data, name).splitlines()]


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """The real products with the original's nouns beside them."""
    folder = tmp_path_factory.mktemp("products")
    for file in data.glob("items_*"):
        shutil.copy(file, folder)
    (folder / "title_nouns.json").write_bytes(read(data, "title_nouns.json.gz"))
    return folder


@pytest.fixture(scope="module")
def shop_file(folder, tmp_path_factory):
    return build_catalog(folder, tmp_path_factory.mktemp("built") / "real.shop").path


@pytest.fixture(scope="module", params=["file", "folder"])
def original(request, folder, shop_file):
    """The world of verl-agent over the built file, and over the folder itself."""
    catalog = shop_file if request.param == "file" else folder
    return build_world(WebShopConfig(catalog=str(catalog), compat="verl_agent"))


@pytest.fixture(scope="module")
def goals(original):
    """The goal list of seed 0."""
    return original.goal_list(0)


def test_every_query_finds_what_lucene_finds_in_its_order(original, data):
    for line in lines(data, "search_top50.jsonl.gz"):
        found = [original.catalog[position].asin for position in original.shop.index.search(line["query"], 50)]
        assert found == line["top50"], line["query"]


def test_prices_are_the_originals(original, goals, data):
    prices = {product.asin: original.shop.price(at, goals[0]) for at, product in enumerate(original.catalog)}
    assert prices == json.loads(read(data, "prices_seed0.json.gz"))


def test_goals_are_the_originals_in_its_order(goals, data):
    expected = json.loads(read(data, "goals.json"))["seed_0"]
    joined = "\n".join(goal.text for goal in goals)
    assert len(goals) == expected["n"]
    assert hashlib.sha256(joined.encode()).hexdigest() == expected["sha256_of_instruction_texts_joined_by_newline"]


def test_goals_are_the_originals_field_by_field(goals, data):
    for index, line in enumerate(lines(data, "goals_seed0_first500.jsonl.gz")):
        goal = goals[index]
        product = goal.product
        assert (product.asin, goal.text) == (line["asin"], line["instruction_text"])
        assert (product.category, product.query) == (line["category"], line["query"])
        assert (product.title, product.product_category) == (line["name"], line["product_category"])
        assert (list(goal.attributes), goal.price_upper) == (line["attributes"], line["price_upper"])
        assert dict(goal.options) == line["goal_options"]
        assert goals.weight(index) == line["weight"]


def test_every_reward_and_its_components_are_the_originals(original, goals, data):
    for line in lines(data, "rewards_seed0.jsonl.gz"):
        position, info = original.catalog.position(line["asin"]), line["info"]
        goal = goals[line["goal"]]
        price = original.shop.price(position, goal)
        reward = purchase_reward(goal, original.catalog[position], price, line["options"], ORIGINAL)
        assert reward.score == line["reward"], line
        assert (reward.kind, reward.attributes, reward.price) == (info["r_type"], info["r_att"], info["r_price"])
        assert (reward.query_match, reward.category_match) == (info["query_match"], info["category_match"])
        assert (reward.title_score, reward.options) == (info["title_score"], info.get("r_option"))
        assert reward.weights == (info["w_att"], info.get("w_option", 0.0), info["w_price"])


def test_every_observation_action_list_reward_and_end_is_the_originals(original, goals, data):
    for line in lines(data, "trajectories_seed0.jsonl.gz"):
        session = Session(original.shop, goals[line["goal"]])
        for step in line["steps"]:
            session.act(step.get("action", ""))
            assert session.original_text() == step["obs"]
            assert session.done == step.get("done", False)
            assert (session.reward.score if session.reward else 0.0) == step.get("reward", 0.0)
            if step.get("avail"):
                assert list(session.clickables) == step["avail"]["clickables"]
                assert session.has_search_box == step["avail"]["has_search_bar"]


def test_an_environment_shows_the_originals_pages_without_task_and_in_quotes(original, goals, data):
    """What verl-agent makes of an observation: the segments after the task, each in quotes."""
    environment = original.make()
    for line in lines(data, "trajectories_seed0.jsonl.gz"):
        task = goals.task(line["goal"], "train")
        observation = environment.reset(task)
        for step in line["steps"]:
            if "action" in step:
                result = environment.step(step["action"])
                observation = result.observation
                assert (result.done, result.score) == (step["done"], step["reward"])
                assert result.won == (step["done"] and step["reward"] == 1.0)
            assert observation.task == original.goal(task).text
            if not step.get("done"):
                segments = step["obs"].split(" [SEP] ")
                after = segments[segments.index(observation.task) + 1 :]
                assert observation.page == " [SEP] ".join(f"'{segment}'" for segment in after)
            else:
                assert observation.page == step["obs"]


def test_tasks_of_another_process_name_the_same_goals(original, goals):
    for index in range(0, len(goals), 97):
        task = goals.task(index, "train")
        assert original.goal(task) == goals[index]


def test_buying_exactly_what_was_asked_wins_all_real_goals_and_not_all_in_the_original(original, goals):
    lost = Counter()
    for goal in goals:
        price = original.shop.price(original.catalog.position(goal.product.asin), goal)
        for rules in (HONEST, ORIGINAL):
            if purchase_reward(goal, goal.product, price, dict(goal.options), rules).score < 1:
                lost[rules is HONEST] += 1
    assert lost == {False: 458}


def test_nouns_by_rule_change_few_scores(original, goals, data):
    plain = {product.asin: replace(product, nouns=title_nouns(product.title)) for product in original.catalog}
    changed = 0
    scored = lines(data, "rewards_seed0.jsonl.gz")
    for line in scored:
        goal = goals[line["goal"]]
        price = original.shop.price(original.catalog.position(line["asin"]), goal)
        goal = replace(goal, product=plain[goal.product.asin])
        score = purchase_reward(goal, plain[line["asin"]], price, line["options"], ORIGINAL).score
        changed += score != line["reward"]
    assert changed / len(scored) < 0.025


def test_real_goals_are_split_by_product(shop_file):
    world = build_world(WebShopConfig(catalog=str(shop_file)))
    asins = {split: {world.goal(task).product.asin for task in world.tasks(split)} for split in SPLITS}
    assert {split: (len(asins[split]), len(world.tasks(split))) for split in SPLITS} == {
        "warmup": (44, 909),
        "train": (295, 4820),
        "validation": (38, 550),
        "test": (38, 622),
    }
    assert len(set().union(*asins.values())) == 415


def test_two_seeds_agree_as_little_as_in_the_original(original):
    one, other = ([((g.product.asin, g.options), g.text) for g in original.goal_list(seed)] for seed in (0, 1))
    assert sum(a == b for (a, _), (b, _) in zip(one, other, strict=True)) == 3
    texts = dict(other)
    assert sum(text == texts[asked] for asked, text in dict(one).items()) == 2804


def test_the_original_trains_on_what_it_holds_out(shop_file):
    original = build_world(WebShopConfig(catalog=str(shop_file), compat="verl_agent"))

    def asked(seed, places):
        return {(goal.product.asin, goal.options) for goal in original.goal_list(seed)[places]}

    held_out, rest = slice(500), slice(500, None)
    tested, trained = asked(1000, held_out), [asked(seed, rest) for seed in range(16)]
    assert len(tested & trained[0]) == 457
    assert len(tested & set().union(*trained)) == 500


def test_human_goals_are_made_of_what_people_wrote_of_these_products(shop_file):
    world = build_world(WebShopConfig(catalog=str(shop_file), goals="human"))
    tasks = [task for split in SPLITS for task in world.tasks(split)]
    assert len(tasks) == 13
    for task in tasks:
        goal = world.goal(task)
        price = world.shop.price(world.catalog.position(goal.product.asin), goal)
        assert purchase_reward(goal, goal.product, price, dict(goal.options), HONEST).score == 1.0


def test_human_goals_of_the_original_are_won_by_bare_values(shop_file):
    world = build_world(WebShopConfig(catalog=str(shop_file), compat="verl_agent", goals="human"))
    goals = world.goal_list(0)
    assert len(goals) == 13
    for index, goal in enumerate(goals):
        assert world.goal(goals.task(index, "train")) == goal
        price = world.shop.price(world.catalog.position(goal.product.asin), goal)
        named = {f"option {number}": value for number, (_, value) in enumerate(goal.options)}
        assert purchase_reward(goal, goal.product, price, named, ORIGINAL).score == 1.0
