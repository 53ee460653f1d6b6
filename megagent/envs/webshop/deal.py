"""What the shop decides by drawing: hidden prices and price bounds. Drawn once, when a catalogue is built.

The draws are the original's, in its order, so that its goals come out word for word: one `uniform` for each product
with a price range, then one sample for each product (or human instruction) that goals are made of.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from megagent.envs.webshop.goals import (
    NO_BOUND,
    asks,
    choices,
    distinct_values,
    human_instructions,
    price_bound,
    winnable_instructions,
)
from megagent.envs.webshop.lazy import LazySequence
from megagent.envs.webshop.panels import panel_of
from megagent.envs.webshop.product import Product
from megagent.errors import CatalogError

PRICE_SEED = 0  # of the draws that a catalogue holds; fixed, so that a task means the same in every run
MOST_CHOICES = 1_000_000  # of one product's options

Bounds = NDArray[np.uint16]  # dollars; 0: no bound


class Dealer:
    """Draws for every product as it comes, and counts its goals. Keeps some 60 bytes a product in memory.

    finish() gives, for a catalogue of P products of which R have a price range, and H human instructions:
        goals/panel           uint8 [P]      place of the product's panel in SPLITS
        goals/price           float64 [P]    the hidden price, dollars
        goals/range_position  uint32 [R]     which products have a range
        goals/range           float64 [R, 2] its ends, dollars
        goals/asks            bool [P]       synthetic goals are made of it
        goals/synthetic       uint32 [P]     how many, each choice of options once
        goals/synthetic_all   uint32 [P]     how many in the original, which repeats values that are listed twice
        goals/synthetic_bound uint16 [P]     price bound, dollars; 0: none
        goals/weight          float64 [P]    weight of each of its synthetic goals in the original's random draw
        goals/human           uint32 [P]     human instructions that the product can meet
        goals/human_all       uint32 [P]     human instructions
        goals/human_bound     uint16 [H]     price bound of each instruction, products in order
    """

    def __init__(self) -> None:
        self._panels = array("B")
        self._lows = array("d")
        self._range_positions = array("I")
        self._ranges = array("d")
        self._asks = array("B")
        self._synthetic = array("I")
        self._synthetic_all = array("I")
        self._human = array("I")
        self._human_all = array("I")
        self._asked = array("I")  # attributes of all products with goals, after each other, as numbers
        self._asked_ends = array("Q")
        self._attribute_numbers: dict[str, int] = {}
        self._attribute_counts = array("Q")

    def add(self, product: Product) -> None:
        """Raises CatalogError if the product's options combine to more than MOST_CHOICES goals."""
        count = choices(product.options) if asks(product) else 0
        if count > MOST_CHOICES:
            raise CatalogError(
                f"product {product.asin}: its options combine to {count} goals, and {MOST_CHOICES} are the most; "
                "remove options or its instruction"
            )
        if len(product.prices) > 1:
            self._range_positions.append(len(self._lows))
            self._ranges.extend(product.prices[:2])
        self._panels.append(panel_of(product.asin))
        self._lows.append(product.prices[0])
        self._asks.append(asks(product))
        self._synthetic.append(choices(distinct_values(product.options)) if count else 0)
        self._synthetic_all.append(count)
        self._human.append(len(winnable_instructions(product)) if product.human else 0)
        self._human_all.append(len(human_instructions(product)))
        if count:
            for attribute in product.instruction_attributes:
                number = self._attribute_numbers.setdefault(attribute, len(self._attribute_numbers))
                if number == len(self._attribute_counts):
                    self._attribute_counts.append(0)
                self._attribute_counts[number] += count
                self._asked.append(number)
        self._asked_ends.append(len(self._asked))

    def finish(self) -> dict[str, np.ndarray]:
        rng = random.Random(PRICE_SEED)
        at = np.array(self._range_positions, dtype=np.uint32)
        ranges = np.array(self._ranges, dtype=np.float64).reshape(-1, 2)
        prices = np.array(self._lows, dtype=np.float64)
        prices[at] = draw_prices(ranges, rng)
        state = rng.getstate()
        asking = np.flatnonzero(np.array(self._asks, dtype=np.bool_))
        bounds = np.zeros(len(prices), dtype=np.uint16)
        bounds[asking] = draw_bounds(prices[asking], rng)
        # The original makes either kind of goals, so the draws of both begin after the prices.
        rng.setstate(state)
        human_all = np.array(self._human_all, dtype=np.uint32)
        return {
            "goals/panel": np.array(self._panels, dtype=np.uint8),
            "goals/price": prices,
            "goals/range_position": at,
            "goals/range": ranges,
            "goals/asks": np.array(self._asks, dtype=np.bool_),
            "goals/synthetic": np.array(self._synthetic, dtype=np.uint32),
            "goals/synthetic_all": np.array(self._synthetic_all, dtype=np.uint32),
            "goals/synthetic_bound": bounds,
            "goals/weight": np.fromiter(self._weights(), dtype=np.float64, count=len(prices)),
            "goals/human": np.array(self._human, dtype=np.uint32),
            "goals/human_all": human_all,
            "goals/human_bound": draw_bounds(np.repeat(prices, human_all), rng),
        }

    def _weights(self) -> Iterator[float]:
        """Of each product: the mean over its asked attributes of 1 / goals that ask for the attribute; 0 without."""
        begin = 0
        for end in self._asked_ends:
            asked = self._asked[begin:end]
            begin = end
            total = 0.0
            for number in asked:  # one after the other: from 3.12 on Python's own sum() rounds otherwise
                total += 1.0 / self._attribute_counts[number]
            yield total / len(asked) if asked else 0.0


def draw_prices(ranges: NDArray[np.float64], rng: random.Random) -> NDArray[np.float64]:
    """A price between the ends of each range, in order. ranges: [R, 2]; returns [R], dollars."""
    drawn = (rng.uniform(low, high) for low, high in ranges.tolist())
    return np.fromiter(drawn, dtype=np.float64, count=len(ranges))


def draw_bounds(prices: NDArray[np.float64], rng: random.Random) -> Bounds:
    """A price bound above each of `prices`, in order; 0 where there is none."""
    drawn = (price_bound(price, rng) for price in prices.tolist())
    return np.fromiter((0 if bound == NO_BOUND else bound for bound in drawn), dtype=np.uint16, count=len(prices))


def as_bound(stored: int) -> float:
    """A stored bound as goals have it, dollars."""
    return float(stored) if stored else NO_BOUND


class Prices(LazySequence[float]):
    """What each product costs, by its position, dollars; a range was drawn from."""

    def __init__(self, arrays: Mapping[str, np.ndarray], drawn: NDArray[np.float64] | None = None) -> None:
        """arrays: of the catalogue. drawn: [R] other draws from the ranges than those that it holds."""
        self._prices = arrays["goals/price"]
        self._ranged = arrays["goals/range_position"]
        self._drawn = drawn

    def __len__(self) -> int:
        return len(self._prices)

    def _at(self, index: int) -> float:
        if self._drawn is not None:
            row = int(np.searchsorted(self._ranged, index))
            if row < len(self._ranged) and self._ranged[row] == index:
                return float(self._drawn[row])
        return float(self._prices[index])
