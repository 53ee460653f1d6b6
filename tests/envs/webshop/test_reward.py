from __future__ import annotations

from dataclasses import replace

import pytest

from megagent.envs.webshop.fuzzy import token_set_ratio
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.reward import purchase_reward
from megagent.envs.webshop.rules import HONEST, ORIGINAL
from megagent.envs.webshop.source import Records, products_of

from .conftest import entry, item


@pytest.fixture
def shirt() -> Product:
    return products_of(Records([item("B1")], {"B1": entry()}))[0]


def goal_of(product: Product, *options: tuple[str, str], attributes=("washable",), price_upper=20.0) -> Goal:
    return Goal(product, "find it", attributes, options, price_upper)


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [
        ("cotton shirt", "shirt cotton", 100),
        ("cotton", "cotton shirt", 100),
        ("red hat", "red cap", 71),
        ("", "cotton", 0),
        ("!?", "cotton", 0),
        ("caf\u00e9 cup", "caf cup", 100),
    ],
)
def test_token_set_ratio_compares_sets_of_words(first, second, ratio):
    assert token_set_ratio(first, second) == ratio


def test_the_score_is_the_share_of_what_was_asked(shirt):
    goal = goal_of(shirt, ("size", "small"), attributes=("washable", "silk"), price_upper=5.0)
    reward = purchase_reward(goal, shirt, 10.5, {"size": "small"}, HONEST)
    assert (reward.attributes, reward.options, reward.price) == (0.5, 1.0, False)
    assert reward.score == 2 / 4
    assert reward.weights == (0.5, 0.25, 0.25)


def test_a_goal_without_options_has_no_share_of_options(shirt):
    assert purchase_reward(goal_of(shirt), shirt, 10.5, {}, HONEST).options is None


def test_an_attribute_may_also_be_met_by_title_bullets_or_description(shirt):
    bare = replace(shirt, attributes=())
    for attribute in ("cotton", "light", "a shirt."):
        assert purchase_reward(goal_of(shirt, attributes=(attribute,)), bare, 1.0, {}, HONEST).attributes == 1.0


@pytest.mark.parametrize(
    ("query", "category", "nouns", "kind"),
    [
        ("shirts", "x", ("shirt", "cotton", "blue"), 1.0),
        ("hats", "x", ("shirt",), 1.0),
        ("hats", "Clothing \u203a Shirts", ("hat",), 0.0),
        ("shirts", "x", ("hat",), 0.0),
    ],
)
def test_titles_overrule_query_and_category(shirt, query, category, nouns, kind):
    other = replace(shirt, query=query, product_category=category, nouns=nouns)
    assert purchase_reward(goal_of(shirt), other, 1.0, {}, HONEST).kind == kind


@pytest.mark.parametrize(("asked", "kind"), [(4, 1.0), (5, 0.5), (11, 0.1)])
def test_a_poor_title_match_of_another_query_counts_less(shirt, asked, kind):
    wanted = replace(shirt, nouns=("shirt", *(f"word{number}" for number in range(asked - 1))))
    other = replace(shirt, query="hats", product_category="x", nouns=("shirt",))
    assert purchase_reward(goal_of(wanted), other, 1.0, {}, HONEST).kind == kind


def test_honest_options_count_only_under_their_own_name(shirt):
    goal = goal_of(shirt, ("color", "red"))
    assert purchase_reward(goal, shirt, 1.0, {"trim": "red"}, HONEST).options == 0.0
    assert purchase_reward(goal, shirt, 1.0, {"color": "red"}, HONEST).options == 1.0


def test_honest_options_do_not_take_a_similar_size(shirt):
    goal = goal_of(shirt, ("size", "36w x 32l"))
    assert purchase_reward(goal, shirt, 1.0, {"size": "36w x 30l"}, HONEST).options == 0.0


@pytest.mark.parametrize("value", ["black1901", "fashion black girl01", "christmasgoo2799"])
def test_the_asked_colour_wins_here_and_cannot_be_satisfied_in_the_original(shirt, value):
    goal = goal_of(shirt, ("color", value))
    assert purchase_reward(goal, shirt, 1.0, {"color": value}, HONEST).score == 1.0
    assert purchase_reward(goal, shirt, 1.0, {"color": value}, ORIGINAL).score < 1.0


def test_the_original_spells_out_what_python_does_not_print_in_an_asked_option(shirt):
    value = "160x100\u00a0cm"
    goal = goal_of(shirt, ("size", value))
    assert purchase_reward(goal, shirt, 1.0, {"size": value}, ORIGINAL).options == 0.0
    assert purchase_reward(goal, shirt, 1.0, {"size": value}, HONEST).options == 1.0


@pytest.mark.parametrize(
    ("bought", "asked", "met"), [("eccec bac bb", "ccbec bac bb", 0.0), ("ccbec bac bb", "eccec bac bb", 1.0)]
)
def test_what_is_bought_is_compared_with_what_is_asked_and_not_the_other_way_round(shirt, bought, asked, met):
    goal = replace(goal_of(shirt), attributes=(asked,))
    assert purchase_reward(goal, replace(shirt, attributes=(bought,)), 1.0, {}, HONEST).attributes == met
    named = goal_of(shirt, ("", asked))
    assert purchase_reward(named, shirt, 1.0, {"style": bought}, ORIGINAL).options == met
