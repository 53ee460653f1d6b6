from __future__ import annotations

import subprocess
import sys
from itertools import combinations

from megagent.envs.base import SPLITS
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.embedded import ATTRIBUTES
from megagent.envs.webshop.goals import hash_of
from megagent.envs.webshop.shopper import PERFECT, demonstrations
from megagent.envs.webshop.world import build_webshop

# Of the products and the tasks' wording. The shipped tiny model was warm-started in this world: if they change, its
# weights have to be made again.
KNOWN = "857752ab42aae6578be13bc8435404547fc185ec143f42600f4607fb70fc08a4"


def test_the_world_is_the_one_that_the_shipped_weights_know(world):
    wording = [world.goal(task).text for split in SPLITS for task in world.tasks(split)]
    assert hash_of("\n".join([world.catalog.digest, *wording])) == KNOWN


def test_another_process_with_another_hash_seed_builds_the_same_tasks(world):
    script = (
        "from megagent.envs.webshop.config import WebShopConfig; from megagent.envs import build_world\n"
        "world = build_world(WebShopConfig(page_size=4)); print(world.digest, world.tasks('train')[0].uid)"
    )
    command = [sys.executable, "-c", script]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}).stdout
    assert shown.split() == [world.digest, world.tasks("train")[0].uid]


def test_the_catalogue_has_the_shape_of_the_recipe(world):
    products = list(world.catalog)
    assert len(products) == 60
    assert len({product.query for product in products}) == 4
    for product in products:
        assert len(product.attributes) == 2
        assert {name: len(values) for name, values in product.options.items()} == {"color": 4, "size": 3}
        assert 5 <= product.prices[0] <= 95


def test_price_bounds_are_tight_and_three_in_ten_are_looser(world):
    goals = [world.goal(task) for split in SPLITS for task in world.tasks(split)]
    slack = [goal.price_upper - goal.product.prices[0] for goal in goals]
    assert all(0 < value <= 20 for value in slack)
    looser = sum(goal.price_upper - goal.product.prices[0] // 10 * 10 > 10 for goal in goals)
    assert 0.25 < looser / len(goals) < 0.35


def test_search_finds_products_by_other_words_than_their_titles(world):
    environment = world.make()
    for query, word in (("tee", "shirt"), ("coat", "jacket"), ("rucksack", "backpack"), ("throw", "blanket")):
        environment.reset(world.tasks("train")[0])
        environment.step(f"search[{query} gentle]")
        best = environment.session.shown()[0].title
        assert word in best
        assert "soft" in best
        assert query not in best


def test_other_words_do_not_count_as_the_attributes_themselves(world):
    for product in world.catalog:
        said = " ".join((product.description, *product.bullets))
        assert not [attribute for attribute in ATTRIBUTES if attribute in said]


def test_no_goal_is_in_two_panels(world):
    uids = {split: {task.uid for task in world.tasks(split)} for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not uids[one] & uids[other]


def test_no_request_is_in_two_panels_whatever_its_price_bound(world):
    requests = {split: {_without_bound(world.goal(task).text) for task in world.tasks(split)} for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not requests[one] & requests[other]


def _without_bound(text: str) -> str:
    head, _, bound = text.partition(", price below ")
    assert bound
    return head


def test_held_out_panels_are_large_enough_to_measure(world):
    assert len(world.tasks("validation")) >= 128
    assert len(world.tasks("test")) >= 128
    assert all(task.split == split for split in SPLITS for task in world.tasks(split))


def test_every_goal_is_won_in_five_steps_by_a_shopper_without_mistakes(world):
    for split in SPLITS:
        tasks = world.tasks(split)
        for episode in demonstrations(world, tasks, len(tasks), PERFECT, max_steps=8, seed=0):
            assert episode.won, episode.task
            assert len(episode.steps) == 5


def test_buying_exactly_what_was_asked_wins_every_goal(world):
    for split in SPLITS:
        for task in world.tasks(split):
            goal = world.goal(task)
            environment = world.make()
            environment.reset(task)
            environment.step(f"search[{goal.product.title} {' '.join(value for _, value in goal.options)}]")
            for text in (goal.product.asin, *(value for _, value in goal.options)):
                environment.step(f"click[{text.lower()}]")
            result = environment.step("click[buy now]")
            assert result.won
            assert (result.score, result.reward) == (1.0, world.success_reward)


def test_three_pages_of_results_fit_in_an_episode_of_eight_steps(world):
    environment = world.make()
    environment.reset(world.tasks("train")[0])
    environment.step("search[shirt]")
    assert len(environment.session.hits) == 12
    last = build_webshop(WebShopConfig(page_size=10)).make()
    last.reset(world.tasks("train")[0])
    assert "Total results: 15" in last.step("search[shirt]").observation.page
