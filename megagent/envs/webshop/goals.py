"""What shoppers are asked to buy, and which panel each goal belongs to."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations

from megagent.envs.base import SPLITS
from megagent.envs.webshop.catalog import Product

NO_BOUND = 1000000.0  # dollars: a goal that asks for no price

# Shares of the panels where goals are split by the product they ask for.
_SHARES = {"warmup": 0.10, "train": 0.70, "validation": 0.10, "test": 0.10}
_BOUNDS = tuple(range(10, 1000, 10))  # dollars


@dataclass(frozen=True, slots=True)
class Goal:
    """One thing to buy. The reward compares a purchase with it."""

    product: Product
    text: str  # the task as the agent reads it
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]  # (name, value) asked for
    price_upper: float  # dollars, inclusive

    @property
    def key(self) -> str:
        """Product and options: what makes this goal another one than its neighbours."""
        return json.dumps([self.product.asin, *self.options], ensure_ascii=True)

    @property
    def uid(self) -> str:
        return f"webshop-{hash_of(self.key)[:16]}"


def hash_of(text: str) -> str:
    """SHA-256 in hex: the same in every process, unlike hash()."""
    return hashlib.sha256(text.encode()).hexdigest()


def option_choices(options: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Every choice of one value for each option, names in alphabetical order; one empty choice without options."""
    names = sorted(options)
    for values in combinations(*(options[name] for name in names)):
        yield tuple(zip(names, values, strict=True))


def synthetic_goals(products: Iterable[Product], prices: Mapping[str, float], rng: random.Random) -> list[Goal]:
    """The original's synthetic goals: each product with an instruction, under every choice of its options.

    prices: asin -> dollars. rng draws the price bounds, one sample for each product in order. The wording is the
    original's, so that the list can be compared with it.
    """
    goals = []
    for item in products:
        if not item.instruction or not item.instruction_attributes:
            continue
        bound, bound_text = _price_bound(prices[item.asin], rng)
        for options in option_choices(item.options):
            asked = ", and ".join(f"{name}: {value}" for name, value in options)
            text = f"{item.instruction}{f' with {asked}' if asked else ''}{bound_text}"
            goals.append(Goal(item, text, item.instruction_attributes, options, bound))
    return goals


def _price_bound(price: float, rng: random.Random) -> tuple[float, str]:
    candidates = [bound for bound in _BOUNDS if bound > price][:4]
    if len(candidates) < 2:
        return NO_BOUND, ""
    bound = float(max(rng.sample(candidates, 2)))
    return bound, f", and price lower than {bound:.2f} dollars"


def split_by_product(goals: Iterable[Goal]) -> dict[str, list[Goal]]:
    """Panels of goals whose products are disjoint: a product's panel follows from a hash of its asin alone.

    Goals that ask for the same product and options are kept once. Each panel is in the order of its goals' hashes, so
    that any first part of it is a fair sample.
    """
    panels: dict[str, list[Goal]] = {split: [] for split in SPLITS}
    for goal in distinct(goals):
        point = int(hash_of(f"panel {goal.product.asin}")[:13], 16) / 16**13
        for split in SPLITS:
            point -= _SHARES[split]
            if point < 0 or split == SPLITS[-1]:
                panels[split].append(goal)
                break
    return panels


def split_by_request(goals: Iterable[Goal], held_out: int) -> dict[str, list[Goal]]:
    """Panels of disjoint requests over the same products, for a catalogue too small to hold products back.

    A request is what is asked for but its price bound; several products may be asked for in the same words, and all
    their goals go together. In the order of the requests' hashes, validation and test take requests until each has at
    least `held_out` goals; warmup and train share the rest evenly.
    """
    requests: dict[str, list[Goal]] = {}
    for goal in distinct(goals):
        requests.setdefault(f"{goal.product.instruction} {goal.options}", []).append(goal)
    groups = [requests[request] for request in sorted(requests, key=hash_of)]
    total = sum(len(group) for group in groups)
    sizes = {"validation": held_out, "test": held_out, "warmup": (total - 2 * held_out) // 2, "train": total}
    panels: dict[str, list[Goal]] = {split: [] for split in SPLITS}
    waiting = iter(groups)
    for split, size in sizes.items():
        while len(panels[split]) < size and (group := next(waiting, None)):
            panels[split] += group
    return panels


def distinct(goals: Iterable[Goal]) -> list[Goal]:
    """Each goal once, in the order of the hashes of product and options."""
    by_key: dict[str, Goal] = {}
    for goal in goals:
        by_key.setdefault(goal.key, goal)
    return sorted(by_key.values(), key=lambda goal: hash_of(goal.key))


def panels_digest(panels: Mapping[str, Sequence[Goal]]) -> str:
    """A hash over the panels: names, order, goals, wording and price bounds."""
    lines = [f"{split} {goal.key} {goal.price_upper} {goal.text}" for split in SPLITS for goal in panels[split]]
    return hash_of("\n".join(lines))
