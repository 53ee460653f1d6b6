"""What shoppers are asked to buy: the wording, the price bound, and the choices of options, each by its number."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megagent.envs.webshop.product import HumanInstruction, Product
from megagent.errors import CatalogError

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


def check_number(number: int, goals: int) -> None:
    """Raises CatalogError if a product with so many goals has none of this number: then its stored count is wrong."""
    if number >= goals:
        raise CatalogError(
            f"the catalogue's counts of goals are damaged (goal {number} of a product with {goals}); build it again"
        )


def choices(options: Mapping[str, Sequence[str]]) -> int:
    """How many choices of one value for each option there are; one, the empty choice, without options."""
    return prod(map(len, options.values()))


def choice(options: Mapping[str, Sequence[str]], number: int) -> Options:
    """The choice with a number from 0: names in alphabetical order, the last name's values turning fastest.

    Raises CatalogError if there is no such choice.
    """
    check_number(number, choices(options))
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
