from __future__ import annotations

from dataclasses import replace

import pytest

from megagent.envs.webshop.goals import NO_BOUND, Goal
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.reward import purchase_reward
from megagent.envs.webshop.rules import HONEST, ORIGINAL, Rules
from megagent.shop.explain import Part, explain
from megagent.shop.visit import OpenShop
from tests.shop.visitors import goal_of


@pytest.fixture
def goal(shop: OpenShop) -> Goal:
    return goal_of(shop, 0)


def explained(
    goal: Goal, bought: Product, chosen: dict[str, str], price: float = 0.0, rules: Rules = HONEST
) -> dict[str, Part]:
    reward = purchase_reward(goal, bought, price, chosen, rules)
    parts = explain(goal, bought, chosen, rules, reward)
    assert sum(part.share or 0.0 for part in parts) == pytest.approx(reward.score)
    return {part.component: part for part in parts}


@pytest.mark.parametrize("rules", [HONEST, ORIGINAL])
def test_all_that_was_asked_for_is_met(goal: Goal, rules: Rules) -> None:
    parts = explained(goal, goal.product, dict(goal.options), rules=rules)
    assert parts["kind of product"].met == "x 1"
    assert parts["attributes"].met == f"{len(goal.attributes)} of {len(goal.attributes)}"
    assert parts["options"].sentence == ", ".join(f"{name}: {value}" for name, value in goal.options)
    assert parts["price"].met == "yes"


def test_what_is_missing_is_named(goal: Goal) -> None:
    asked = replace(goal, attributes=(*goal.attributes, "waterproof"))
    (first, value), (second, other) = goal.options
    parts = explained(asked, goal.product, {first: value})
    assert parts["attributes"].sentence == f"{', '.join(goal.attributes)}; missing: waterproof"
    assert parts["options"].met == "1 of 2"
    assert parts["options"].sentence == f"{first}: {value}; missing: {second}: {other}"


def test_a_price_above_the_bound_is_told_with_the_bound(goal: Goal) -> None:
    part = explained(replace(goal, price_upper=30.0), goal.product, {}, price=31.0)["price"]
    assert (part.met, part.share) == ("no", 0.0)
    assert part.sentence == f"{goal.product.price_tag}, above the bound of $30.00"


def test_no_bound_and_no_options_are_told_as_such(goal: Goal) -> None:
    parts = explained(replace(goal, price_upper=NO_BOUND, options=()), goal.product, {})
    assert "no bound was asked for" in parts["price"].sentence
    assert "options" not in parts


@pytest.mark.parametrize(
    ("nouns", "met", "told"),
    [
        (
            ("tent",),
            "x 0",
            "another kind: another query and category, and its title has 0% of the nouns of the wanted ",
        ),
        (("lamp", *"bcdefghijkl"), "x 0.1", "so only 10% counts"),
        (("lamp", *"bcdefg"), "x 0.5", "so only 50% counts"),
        (("lamp", "b"), "x 1", "the right kind: another query and category, and its title has 50%"),
    ],
)
def test_another_kind_of_product_takes_its_part_of_the_whole_score(
    goal: Goal, nouns: tuple[str, ...], met: str, told: str
) -> None:
    bought = replace(goal.product, query="q", product_category="c", nouns=("lamp",))
    part = explained(replace(goal, product=replace(goal.product, nouns=nouns)), bought, {})["kind of product"]
    assert (part.met, part.share) == (met, None)
    assert told in part.sentence
