from __future__ import annotations

import random

import numpy as np
import pytest

from megagent.envs.webshop.deal import Dealer, Prices, draw_prices
from megagent.envs.webshop.goals import NO_BOUND, price_bound
from megagent.envs.webshop.product import HumanInstruction
from megagent.errors import CatalogError

from .shelf import product


def dealt(*products):
    dealer = Dealer()
    for each in products:
        dealer.add(each)
    return dealer.finish()


def test_all_prices_are_drawn_before_the_first_bound_in_the_order_of_the_products():
    rng = random.Random(0)
    prices = [rng.uniform(5, 50), 10.5, rng.uniform(60, 70)]
    bounds = [price_bound(price, rng) for price in prices]
    arrays = dealt(product("B1", prices=(5.0, 50.0)), product("B2"), product("B3", prices=(60.0, 70.0)))
    assert arrays["goals/price"].tolist() == prices
    assert arrays["goals/synthetic_bound"].tolist() == bounds


def test_human_bounds_are_drawn_as_if_there_were_no_synthetic_ones():
    human = (HumanInstruction("one", ("light",), ()), HumanInstruction("two", ("light",), ()))
    rng = random.Random(0)
    arrays = dealt(product("B1"), product("B2", human=human))
    assert arrays["goals/human_bound"].tolist() == [price_bound(10.5, rng), price_bound(10.5, rng)]
    assert arrays["goals/human"].tolist() == [0, 2]


def test_a_product_without_instruction_has_no_goals_and_costs_no_draw():
    arrays = dealt(product("B1", instruction="", instruction_attributes=()), product("B2"))
    assert arrays["goals/synthetic"].tolist() == [0, 6]
    assert arrays["goals/synthetic_bound"].tolist() == [0, price_bound(10.5, random.Random(0))]


def test_values_that_are_listed_twice_count_once_but_in_the_original():
    arrays = dealt(product("B1", options={"size": ("s", "m", "s")}))
    assert (arrays["goals/synthetic"].tolist(), arrays["goals/synthetic_all"].tolist()) == ([2], [3])


def test_weights_are_the_mean_of_one_over_the_goals_that_ask_for_an_attribute():
    arrays = dealt(
        product("B1", options={}, instruction_attributes=("light", "soft")),
        product("B2", options={"size": ("s", "m", "l")}, instruction_attributes=("light",)),
        product("B3", instruction=""),
    )
    assert arrays["goals/weight"].tolist() == [(1 / 4 + 1) / 2, 1 / 4, 0.0]


def test_options_that_combine_without_end_are_refused_by_name():
    options = {f"option {number}": tuple("abcdefghij") for number in range(7)}
    with pytest.raises(CatalogError, match="product B1: its options combine to 10000000 goals, and 1000000 are the"):
        dealt(product("B1", options=options))
    assert dealt(product("B1", options=options, instruction=""))["goals/synthetic"].tolist() == [0]


def test_prices_of_another_seed_differ_only_where_there_is_a_range():
    arrays = dealt(product("B1"), product("B2", prices=(5.0, 50.0)), product("B3"))
    other = Prices(arrays, draw_prices(arrays["goals/range"], random.Random(1)))
    assert other[:] == [10.5, random.Random(1).uniform(5, 50), 10.5]
    assert Prices(arrays)[1] == random.Random(0).uniform(5, 50)
    assert len(other) == 3


def test_no_bound_is_stored_as_zero():
    arrays = dealt(product("B1", prices=(985.0,)))
    assert price_bound(985.0, random.Random(0)) == NO_BOUND
    assert np.array_equal(arrays["goals/synthetic_bound"], [0])
