"""A small catalogue made by rule, the same everywhere: what the demo trains on, and tests that need no data.

60 products: each of 4 kinds with each pair of 6 attributes, in 4 of 6 colours and 3 of 4 sizes, at $5 to $95. Titles,
options and goals use few words, so that a tiny model can learn them; descriptions say the same in other words, which
the search finds too. The records have the original's schema and pass through the same loader and builders as any other.
"""

from __future__ import annotations

import random
from itertools import combinations

from megagent.envs.webshop.goals import Goal, Options, hash_of
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.source import Records

KINDS = {"shirt": "tee", "jacket": "coat", "backpack": "rucksack", "blanket": "throw"}  # with another word for each
# None of the other words holds one of the attributes: the reward would take it for the attribute itself.
ATTRIBUTES = {
    "soft": "gentle",
    "warm": "cosy",
    "durable": "sturdy",
    "washable": "easy-care",
    "light": "airy",
    "thick": "dense",
}
COLORS = ("red", "blue", "green", "black", "white", "yellow")
SIZES = ("small", "medium", "large", "huge")

PRODUCTS = 60  # kinds times pairs of attributes
RESULT_PAGES = 3  # more would not fit in an episode of eight steps
HELD_OUT = 128  # goals each for validation and test

_SEED = 0


def records() -> Records:
    """The catalogue in the original's schema."""
    rng = random.Random(_SEED)
    pairs = list(combinations(ATTRIBUTES, 2))
    kinds = tuple(KINDS)
    names = rng.sample(range(100, 1000), PRODUCTS)
    items, attributes, nouns = [], {}, {}
    for number in range(PRODUCTS):
        kind = kinds[number % len(KINDS)]
        # Every pair once for each kind: a title is found by reading it, not by knowing which of its bearers is meant.
        pair = pairs[number // len(KINDS)]
        colors = sorted(rng.sample(COLORS, 4), key=COLORS.index)
        sizes = sorted(rng.sample(SIZES, 3), key=SIZES.index)
        asin = f"B{names[number]}"
        items.append(
            {
                "asin": asin,
                "name": f"{' '.join(pair)} {kind}",
                "full_description": f"a {KINDS[kind]}, {' and '.join(ATTRIBUTES[one] for one in pair)}.",
                "small_description": ["made for every day.", "free returns, one year warranty."],
                "pricing": f"${rng.randint(5, 95)}",
                "images": ["none"],
                "product_category": f"shop \u203a {kind}",
                "category": "shop",
                "query": kind,
                "customization_options": {
                    "color": [{"value": color} for color in colors],
                    "size": [{"value": size} for size in sizes],
                },
            }
        )
        attributes[asin] = {
            "attributes": list(pair),
            "instruction": f"find {' '.join(pair)} {kind}",
            "instruction_attributes": list(pair),
        }
        nouns[asin] = [kind]
    return Records(items=items, attributes=attributes, nouns=nouns, name="embedded")


def goal(item: Product, options: Options) -> Goal:
    """The goal to buy `item` with `options`; its price bound is tight, as in `price_bound`."""
    bound = price_bound(item, options)
    asked = ", ".join(f"{name} {value}" for name, value in options)
    text = f"{item.instruction}, {asked}, price below {bound:.0f}"
    return Goal(item, text, item.instruction_attributes, options, bound)


def price_bound(item: Product, options: Options) -> float:
    """The next multiple of 10 above the price, and 10 more for 30% of the goals, chosen by a hash. Dollars."""
    loose = int(hash_of(f"bound {item.asin} {options}")[:8], 16) / 16**8 < 0.3
    return (item.prices[0] // 10 + 1 + loose) * 10
