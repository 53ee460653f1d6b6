"""What shoppers are asked to buy: the wording, the price bound, and the choices of options, each by its number."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from math import prod

from megagent.envs.base import SPLITS
from megagent.envs.webshop.product import HumanInstruction, Product

NO_BOUND = 1000000.0  # dollars: a goal that asks for no price
HIGHEST_BOUND = 990  # dollars; bounds are multiples of 10

Options = tuple[tuple[str, str], ...]  # (name, value) asked for, one for each option


@dataclass(frozen=True, slots=True)
class Goal:
    """One thing to buy. The reward compares a purchase with it."""

    product: Product
    text: str  # the task as the agent reads it
    attributes: tuple[str, ...]
    options: Options  # an empty name stands for any option: the original's human goals name values only
    price_upper: float  # dollars, inclusive
    words: str = ""  # of a human goal: what the person wrote
    price_seed: int = 0  # which draw of the hidden prices the bound belongs to

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


def price_bound(price: float, rng: random.Random) -> float:
    """A bound somewhat above `price`, in dollars: the larger of two of the next four multiples of ten.

    NO_BOUND, without a draw, where fewer than two of them are at most HIGHEST_BOUND. rng: one sample of two.
    """
    if price >= HIGHEST_BOUND:
        return NO_BOUND
    first = (int(price // 10) + 1) * 10
    candidates = range(first, min(first + 40, HIGHEST_BOUND + 10), 10)
    return float(max(rng.sample(candidates, 2))) if len(candidates) >= 2 else NO_BOUND


def bound_text(bound: float) -> str:
    """How a task says its price bound, after everything else."""
    return "" if bound >= NO_BOUND else f", and price lower than {bound:.2f} dollars"


def asks(product: Product) -> bool:
    """Whether synthetic goals are made of a product."""
    return bool(product.instruction and product.instruction_attributes)


def distinct_values(options: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The options with each value once, in the order of their first appearance."""
    return {name: tuple(dict.fromkeys(values)) for name, values in options.items()}


def choices(options: Mapping[str, Sequence[str]]) -> int:
    """How many choices of one value for each option there are; one, the empty choice, without options."""
    return prod(map(len, options.values()))


def choice(options: Mapping[str, Sequence[str]], number: int) -> Options:
    """The choice with a number from 0: names in alphabetical order, the last name's values turning fastest."""
    chosen: list[tuple[str, str]] = []
    for name in sorted(options, reverse=True):
        values = options[name]
        number, index = divmod(number, len(values))
        chosen.append((name, values[index]))
    return tuple(reversed(chosen))


def synthetic_goal(product: Product, options: Options, bound: float, price_seed: int = 0) -> Goal:
    """The original's synthetic goal: the product's instruction, the options, the price bound."""
    asked = ", and ".join(f"{name}: {value}" for name, value in options)
    text = f"{product.instruction}{f' with {asked}' if asked else ''}{bound_text(bound)}"
    return Goal(product, text, product.instruction_attributes, options, bound, price_seed=price_seed)


def human_goal(
    product: Product, instruction: HumanInstruction, options: Options, bound: float, price_seed: int = 0
) -> Goal:
    """The original's human goal: what a person wrote, and the price bound."""
    text = f"{instruction.text.strip('.')}{bound_text(bound)}"
    return Goal(product, text, instruction.attributes, options, bound, instruction.text, price_seed)


def human_instructions(product: Product) -> list[HumanInstruction]:
    """What people wrote about a product that goals are made of: whatever asks for an attribute."""
    return [instruction for instruction in product.human if instruction.attributes]


def winnable_instructions(product: Product) -> dict[int, Options]:
    """Which of `human_instructions` the product can meet, by number, and the options that they ask for by name.

    People wrote bare values; each is looked up among the product's options, in page order. Left out are instructions
    with a value that the product does not have, with two values of one option, or with a text that came before.
    """
    found: dict[int, Options] = {}
    texts: set[str] = set()
    for number, instruction in enumerate(human_instructions(product)):
        named: dict[str, str] = {}
        for value in instruction.options:
            name = next((name for name, values in product.options.items() if value in values), None)
            if name is None or named.setdefault(name, value) != value:
                break
        else:
            if instruction.text not in texts:
                texts.add(instruction.text)
                found[number] = tuple(named.items())
    return found


def goal_key(asin: str, asked: Options | str, *more: float) -> str:
    """Names a goal, readable: the product, and the options or a person's words; `more` as numbers at the end."""
    return json.dumps([asin, *((asked,) if isinstance(asked, str) else asked), *more], ensure_ascii=True)


# --- going away ---

_SHARES = {"warmup": 0.10, "train": 0.70, "validation": 0.10, "test": 0.10}
_BOUNDS = tuple(range(10, 1000, 10))  # dollars


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
