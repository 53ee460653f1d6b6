"""Which panel a goal belongs to, and in which order a panel comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megagent.envs.base import SPLITS
from megagent.envs.webshop.goals import hash_of
from megagent.envs.webshop.lazy import LazySequence

Place = tuple[int, int]  # position of the product, number of the goal among the product's

# Shares of the panels where goals are split by the product they ask for.
SHARES = {"warmup": 0.10, "train": 0.70, "validation": 0.10, "test": 0.10}

_ROUNDS = 6
_WORD = (1 << 64) - 1


def panel_of(asin: str) -> int:
    """The panel of all goals that ask for a product, as its place in SPLITS; it follows from the asin alone."""
    point = int(hash_of(f"panel {asin}")[:13], 16) / 16**13
    for number, split in enumerate(SPLITS[:-1]):
        point -= SHARES[split]
        if point < 0:
            return number
    return len(SPLITS) - 1


class Shuffle(LazySequence[int]):
    """The numbers 0 to length - 1 in an order that looks random and is computed, not stored.

    A Feistel network over the next even number of bits; what falls outside the range is sent through again, which
    keeps it a permutation. The same length and key give the same order everywhere.
    """

    def __init__(self, length: int, key: str) -> None:
        self._length = length
        self._half = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
        self._keys = [int(hash_of(f"{key} {turn}")[:16], 16) for turn in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._length

    def _at(self, index: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        number = index
        while True:
            left, right = number >> half, number & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            number = left << half | right
            if number < self._length:
                return number


def _mixed(word: int) -> int:
    """A 64-bit word whose every bit depends on all of `word`'s. Source: the finaliser of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


class ShuffledPlaces(LazySequence[Place]):
    """All goals of some products, in an order of which any first part is a fair sample."""

    def __init__(self, positions: NDArray[np.integer], counts: NDArray[np.integer], key: str) -> None:
        """positions: [products] in the catalogue; counts: [products] goals of each, none of them 0."""
        self._positions = positions
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._order = Shuffle(int(self._ends[-1]) if len(self._ends) else 0, key)

    def __len__(self) -> int:
        return len(self._order)

    def _at(self, index: int) -> Place:
        row, number = place_of(self._order[index], self._ends)
        return int(self._positions[row]), number


def place_of(number: int, ends: NDArray[np.int64]) -> Place:
    """Where the goal with this number among those of all products is. ends: [products] running sums of their goals."""
    position = int(np.searchsorted(ends, number, side="right"))
    return position, number - (int(ends[position - 1]) if position else 0)


def split_by_product(panels: NDArray[np.integer], counts: NDArray[np.integer]) -> dict[str, Sequence[Place]]:
    """Panels whose products are disjoint. panels, counts: [products] `panel_of` and goals of each product."""
    split: dict[str, Sequence[Place]] = {}
    for number, name in enumerate(SPLITS):
        positions = np.flatnonzero((panels == number) & (counts > 0))
        split[name] = ShuffledPlaces(positions.astype(np.uint32), counts[positions], name)
    return split


def split_by_request(requests: Mapping[str, Sequence[Place]], held_out: int) -> dict[str, Sequence[Place]]:
    """Panels of disjoint requests over the same products, for a catalogue too small to hold products back.

    requests: the goals that ask for the same in the same words, price bound aside; several products may be asked for
    so, and all their goals go together. In the order of the requests' hashes, validation and test take requests until
    each has at least `held_out` goals; warmup and train share the rest evenly.
    """
    groups = [requests[request] for request in sorted(requests, key=hash_of)]
    total = sum(len(group) for group in groups)
    sizes = {"validation": held_out, "test": held_out, "warmup": (total - 2 * held_out) // 2, "train": total}
    panels: dict[str, list[Place]] = {split: [] for split in SPLITS}
    waiting = iter(groups)
    for split, size in sizes.items():
        while len(panels[split]) < size and (group := next(waiting, None)):
            panels[split] += group
    return dict(panels)
