from __future__ import annotations

import random
from itertools import product as combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs.webshop import goals
from megagent.envs.webshop.goals import NO_BOUND
from megagent.envs.webshop.product import HumanInstruction
from megagent.errors import CatalogError

from .shelf import product

VALUES = st.lists(st.sampled_from("abc"), max_size=3).map(tuple)


def test_choices_turn_the_last_name_of_the_alphabet_fastest():
    options = {"size": ("s", "m"), "color": ("red", "blue")}
    assert [goals.choice(options, number) for number in range(goals.choices(options))] == [
        (("color", "red"), ("size", "s")),
        (("color", "red"), ("size", "m")),
        (("color", "blue"), ("size", "s")),
        (("color", "blue"), ("size", "m")),
    ]


@pytest.mark.parametrize("options", [{"size": ("s", "m")}, {"size": ()}, {"size": (), "color": ("red",)}, {}])
def test_a_choice_that_is_not_there_is_damage(options):
    with pytest.raises(CatalogError, match="counts of goals are damaged .* build it again"):
        goals.choice(options, goals.choices(options))


@given(options=st.dictionaries(st.sampled_from(["size", "color", "fit", "a"]), VALUES))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_numbered_choices_are_those_of_the_product_of_all_values(options):
    names = sorted(options)
    expected = [tuple(zip(names, row, strict=True)) for row in combinations(*(options[name] for name in names))]
    assert [goals.choice(options, number) for number in range(goals.choices(options))] == expected


def test_a_product_without_options_has_one_choice_and_an_option_without_values_leaves_none():
    assert (goals.choices({}), goals.choice({}, 0)) == (1, ())
    assert goals.choices({"size": (), "color": ("red",)}) == 0


def test_a_price_bound_is_one_of_the_four_multiples_of_ten_above_the_price_but_never_the_first():
    drawn = {goals.price_bound(19.99, random.Random(seed)) for seed in range(100)}
    assert drawn == {30.0, 40.0, 50.0}


@pytest.mark.parametrize(("price", "bounds"), [(0.0, {20, 30, 40}), (10.0, {30, 40, 50}), (970.0, {990})])
def test_a_bound_lies_strictly_above_the_price(price, bounds):
    assert {goals.price_bound(price, random.Random(seed)) for seed in range(100)} == bounds


@pytest.mark.parametrize("price", [980.0, 990.0, 1e300])
def test_dear_products_have_no_bound_and_cost_no_draw(price):
    rng = random.Random(0)
    before = rng.getstate()
    assert goals.price_bound(price, rng) == NO_BOUND
    assert rng.getstate() == before
    assert goals.bound_text(NO_BOUND) == ""


def test_a_synthetic_goal_says_instruction_options_and_bound():
    goal = goals.synthetic_goal(product("B1"), (("color", "red"), ("size", "s")), 20.0)
    assert goal.text == "Find me washable shirts with color: red, and size: s, and price lower than 20.00 dollars"


def test_a_human_goal_says_the_words_without_the_full_stop_and_the_bound():
    instruction = HumanInstruction("i want a shirt.", ("washable",), ("red",))
    goal = goals.human_goal(product("B1"), instruction, (("color", "red"),), 20.0)
    assert goal.text == "i want a shirt, and price lower than 20.00 dollars"


def test_values_of_people_are_found_among_the_options_and_what_cannot_be_met_is_left_out():
    human = (
        HumanInstruction("no attributes", (), ()),
        HumanInstruction("red and small", ("washable",), ("s", "red")),
        HumanInstruction("two colours", ("washable",), ("red", "blue")),
        HumanInstruction("not sold", ("washable",), ("purple",)),
        HumanInstruction("anything", ("washable",), ()),
        HumanInstruction("anything", ("light",), ()),
    )
    item = product("B1", human=human)
    assert [instruction.text for instruction in goals.human_instructions(item)] == [
        "red and small",
        "two colours",
        "not sold",
        "anything",
        "anything",
    ]
    assert goals.winnable_instructions(item) == {0: (("size", "s"), ("color", "red")), 3: ()}
