"""How well a purchase meets a goal.

Source: WebShop, section 3.2 and appendix A (arXiv 2207.01206), with the thresholds of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megagent.envs.webshop.fuzzy import token_set_ratio
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.rules import Rules

_ALIKE = 85  # token set ratio above which two texts count as the same

# The first colour of this list that is part of a value stands for the value; the order matters.
_COLORS_TEXT = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream "
    "crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather "
    "indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha "
    "multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal "
    "rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise "
    "violet walnut wheat white wine yellow"
)
_COLORS = tuple(_COLORS_TEXT.split())


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of a purchase and what it is made of.

    score = kind * (attributes met + options met + price met) / (attributes asked + options asked + 1)
    """

    score: float  # 0 to 1
    kind: float  # is it the right kind of product: 0, 0.1, 0.5 or 1
    query_match: bool
    category_match: bool
    title_score: float  # shared nouns of the titles / nouns of the goal's title
    attributes: float  # share of the asked attributes that are met
    options: float | None  # share of the asked options that are met; None if none were asked
    price: bool
    weights: tuple[float, float, float]  # parts of the score that attributes, options and price make up


def purchase_reward(goal: Goal, bought: Product, price: float, chosen: Mapping[str, str], rules: Rules) -> Reward:
    """Scores buying `bought` for `price` dollars with the options `chosen` (name -> value) when `goal` was asked."""
    query_match = bought.query == goal.product.query
    category_match = len(_levels(bought) & _levels(goal.product)) >= 2
    title_score = _title_score(goal.product.nouns, bought.nouns)
    kind = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    # The titles overrule query and category: nothing in common means another kind of thing.
    if title_score < 0.1:
        kind = 0.1
    if title_score == 0.0:
        kind = 0.0
    attributes_met = sum(_has_attribute(bought, attribute) for attribute in goal.attributes)
    met_option = _bought_by_name if rules.options_by_name else _bought_under_any_name
    options_met = sum(met_option(name, value, chosen) for name, value in goal.options)
    price_met = price <= goal.price_upper
    asked = len(goal.attributes) + len(goal.options) + 1
    return Reward(
        score=kind * ((attributes_met + options_met + price_met) / asked),
        kind=kind,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
        attributes=attributes_met / len(goal.attributes),
        options=options_met / len(goal.options) if goal.options else None,
        price=price_met,
        weights=(len(goal.attributes) / asked, len(goal.options) / asked, 1 / asked),
    )


def _levels(product: Product) -> set[str]:
    return {level.strip() for level in product.product_category.split("\u203a")}


def _title_score(asked: tuple[str, ...], bought: tuple[str, ...]) -> float:
    # The denominator counts repeated nouns, the numerator does not: so it is in the original.
    return len(set(asked) & set(bought)) / len(asked) if asked else 0.2


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(token_set_ratio(own, attribute) > _ALIKE for own in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def _bought_by_name(name: str, value: str, chosen: Mapping[str, str]) -> bool:
    return chosen.get(name) == value


def _bought_under_any_name(name: str, value: str, chosen: Mapping[str, str]) -> bool:
    """The original's comparison. Its asked colour is normalised only if name or value is exactly a colour.

    Of a human goal only the value is asked for, without a name; it is normalised as the bought values are.
    """
    pair = (name, value)
    # As Python prints the pair: a no-break space in the value is spelt out there, and not in the bought one.
    asked = next((color for color in _COLORS if color in pair), str(pair)) if name else _color(value)
    return any(token_set_ratio(_color(bought), asked) > _ALIKE for bought in chosen.values())


def _color(value: str) -> str:
    return next((color for color in _COLORS if color in value), value)
