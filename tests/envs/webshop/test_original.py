from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megagent.envs.webshop.original import HELD_OUT_PLACES, OriginalGoals, OriginalPanels
from megagent.envs.webshop.product import HumanInstruction
from megagent.envs.webshop.rules import ORIGINAL
from megagent.errors import CatalogError

from .shelf import shelf


@pytest.fixture(scope="module")
def catalog():
    """100 products with 6 goals each, every price drawn."""
    return shelf(100, prices=(5.0, 95.0))


@pytest.fixture(scope="module")
def panels(catalog):
    return OriginalPanels(catalog, human=False)


def names(tasks):
    return [task.uid.removeprefix("verl-agent-") for task in tasks]


def test_a_list_is_shuffled_by_its_seed_alone(catalog):
    goals = OriginalGoals(catalog, human=False)
    order = list(range(600))
    random.Random(3).shuffle(order)
    assert [(goal.product.asin, goal.options) for goal in goals.of_seed(3)] == [
        (f"B{place // 6}", goals.goal(place, np.zeros(100, dtype=np.uint16), 3).options) for place in order
    ]


def test_the_same_place_means_another_goal_and_another_price_under_another_seed(catalog):
    goals = OriginalGoals(catalog, human=False)
    one, other = goals.of_seed(0), goals.of_seed(1)
    same = sum(a.product == b.product and a.options == b.options for a, b in zip(one, other, strict=True))
    assert same < 20
    assert goals.prices(0)[:] != goals.prices(1)[:]


def test_a_held_out_goal_is_trained_on_under_another_seed(panels):
    """The leak of the original, which env.compat=verl_agent keeps."""
    held_out = {(goal.product.asin, goal.options) for goal in panels.goals.of_seed(1000)[:HELD_OUT_PLACES]}
    trained = {
        (goal.product.asin, goal.options) for seed in range(16) for goal in panels.goals.of_seed(seed)[HELD_OUT_PLACES:]
    }
    assert len(held_out & trained) > 0.9 * len(held_out)


def test_resets_draw_places_as_one_numpy_stream_does(panels):
    stream = np.random.RandomState(7)
    for iteration in (1, 2, 3):
        places = stream.choice(range(500, 600), size=4, replace=False)
        expected = [f"{7 + group}-{place}" for group, place in enumerate(places)]
        assert names(panels.draw("train", 4, seed=7, iteration=iteration)) == expected


def test_validation_draws_from_the_head_of_lists_of_seeds_of_its_own(panels):
    places = np.random.RandomState(1007).choice(range(500), size=3, replace=False)
    expected = [f"{1007 + group}-{place}" for group, place in enumerate(places)]
    assert names(panels.draw("validation", 3, seed=7, iteration=1)) == expected


def test_a_resumed_run_draws_what_the_first_would_have_drawn(catalog, panels):
    drawn = {iteration: panels.draw("train", 4, 0, iteration) for iteration in range(1, 6)}
    assert OriginalPanels(catalog, human=False).draw("train", 4, 0, 4) == drawn[4]
    assert panels.draw("train", 4, 0, 2) == drawn[2]


def test_more_tasks_than_the_panel_holds_are_refused(panels):
    with pytest.raises(CatalogError, match="101 tasks at once cannot be drawn from the 100 of the train panel"):
        panels.draw("train", 101, 0, 1)


def test_any_process_reads_the_goal_and_its_price_seed_from_the_task(catalog, panels):
    task = panels.draw("train", 4, seed=0, iteration=1)[3]
    goal = OriginalPanels(catalog, human=False).find(task)
    assert goal is not None
    assert goal.price_seed == 3
    assert goal == panels.goals.of_seed(3)[int(task.uid.split("-")[-1])]


def test_a_goal_at_random_is_never_the_first_and_twice_as_often_the_last():
    goals = OriginalGoals(shelf(1, options={"size": ("s", "m", "l", "xl")}), human=False).of_seed(0)
    rng = random.Random(0)
    drawn = Counter(goals.random_place(rng) for _ in range(4000))
    assert drawn[0] == 0
    assert drawn.total() == 4000
    assert all(900 < drawn[place] < 1100 for place in (1, 2))
    assert 1900 < drawn[3] < 2100


def test_a_goal_at_random_is_itself_without_the_rule():
    rules = replace(ORIGINAL, random_goal_is_next=False)
    goals = OriginalGoals(shelf(1, options={"size": ("s", "m")}), human=False, rules=rules).of_seed(0)
    rng = random.Random(0)
    drawn = Counter(goals.random_place(rng) for _ in range(1000))
    assert all(400 < drawn[place] < 600 for place in (0, 1))


def test_prices_and_bounds_are_of_every_seed_the_same_where_they_are_drawn_once(catalog):
    goals = OriginalGoals(catalog, human=False, rules=replace(ORIGINAL, draws_once=True))
    assert goals.prices(0)[:] == goals.prices(1)[:] == catalog.arrays["goals/price"].tolist()
    one, other = ({(g.product.asin, g.options, g.price_upper) for g in goals.of_seed(seed)} for seed in (0, 1))
    assert one == other


def test_a_value_listed_twice_makes_two_goals_but_where_goals_come_once():
    twice = shelf(1, options={"size": ("s", "m", "s")})
    assert len(OriginalGoals(twice, human=False).of_seed(0)) == 3
    once = OriginalGoals(twice, human=False, rules=replace(ORIGINAL, goals_once=True)).of_seed(0)
    assert sorted(goal.options for goal in once) == [(("size", "m"),), (("size", "s"),)]


def test_human_goals_keep_bare_values_also_of_what_the_product_does_not_have():
    human = (HumanInstruction("a purple one.", ("light",), ("purple",)), HumanInstruction("nothing", (), ()))
    panels = OriginalPanels(shelf(3, human=human), human=True)
    listed = panels.goals.of_seed(0)
    assert len(listed) == 3
    assert {goal.options for goal in listed} == {(("", "purple"),)}
    assert panels.find(listed.task(1, "train")) == listed[1]
