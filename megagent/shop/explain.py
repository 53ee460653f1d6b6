"""A score in words: what was asked for, what of it was bought, and how much of the score it makes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megagent.envs.webshop.goals import NO_BOUND, Goal
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.reward import Reward, purchase_reward
from megagent.envs.webshop.rules import Rules


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a score."""

    component: str
    met: str
    share: float | None  # of the score; the shares add up to it. None: it multiplies the others
    sentence: str


def explain(goal: Goal, bought: Product, chosen: Mapping[str, str], rules: Rules, reward: Reward) -> list[Part]:
    """The components of `reward`, which is for buying `bought` with the options `chosen` when `goal` was asked."""

    def scored(**asked: object) -> Reward:
        return purchase_reward(replace(goal, **asked), bought, 0.0, chosen, rules)  # type: ignore[arg-type]

    # What is met by name is found by asking for one thing at a time, so that it follows the reward's own rules.
    attributes = [(name, scored(attributes=(name,)).attributes == 1.0) for name in goal.attributes]
    options = [(pair, scored(options=(pair,)).options == 1.0) for pair in goal.options]
    of_attributes, of_options, of_price = (weight * reward.kind for weight in reward.weights)
    parts = [
        Part("kind of product", f"x {reward.kind:g}", None, _kind(reward)),
        Part("attributes", _count(attributes), of_attributes * reward.attributes, _named(attributes)),
    ]
    if reward.options is not None:
        named = [(f"{name}: {value}" if name else value, met) for (name, value), met in options]
        parts.append(Part("options", _count(named), of_options * reward.options, _named(named)))
    price = Part("price", "yes" if reward.price else "no", of_price * reward.price, _price(goal, bought, reward.price))
    return [*parts, price]


def _count(asked: Sequence[tuple[object, bool]]) -> str:
    return f"{sum(met for _, met in asked)} of {len(asked)}"


def _named(asked: Sequence[tuple[str, bool]]) -> str:
    met = ", ".join(name for name, is_met in asked if is_met)
    missing = ", ".join(name for name, is_met in asked if not is_met)
    return "; ".join(filter(None, [met, missing and f"missing: {missing}"]))


def _kind(reward: Reward) -> str:
    same = [name for name, holds in (("query", reward.query_match), ("category", reward.category_match)) if holds]
    alike = f"its title has {reward.title_score:.0%} of the nouns of the wanted one's"
    found = f"the same {' and '.join(same)}, and {alike}" if same else f"another query and category, and {alike}"
    if reward.kind == 1.0:
        return f"the right kind: {found}"
    counts = "nothing counts" if reward.kind == 0.0 else f"only {reward.kind:.0%} counts"
    return f"another kind: {found}, so {counts}"


def _price(goal: Goal, bought: Product, met: bool) -> str:
    if goal.price_upper >= NO_BOUND:
        return f"{bought.price_tag}; no bound was asked for"
    sampled = " (one price of the range is charged)" if len(bought.prices) > 1 else ""
    return f"{bought.price_tag}{sampled}, {'within' if met else 'above'} the bound of ${goal.price_upper:.2f}"
