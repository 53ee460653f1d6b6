"""Python's `random.shuffle` of a long list, without the list: which element comes to a place, and all of them.

The shuffle goes from the last place to the second and swaps each with a partner drawn from the places up to it. The
partners are drawn here a block at a time, from the same stream of 32-bit words and with the same rejections; a single
place is then followed back through the swaps. A list of eight million is asked in a fraction of a second.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16  # words


class Shuffled:
    """What `random.Random(seed).shuffle` makes of the numbers 0 to length - 1."""

    def __init__(self, length: int, seed: int) -> None:
        self._partners = _partners(length, seed)

    def __len__(self) -> int:
        return len(self._partners)

    def __getitem__(self, place: int) -> int:
        """The number at a place from 0. Raises IndexError beyond the last."""
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} of {len(self)}")
        # A place is final after its own swap, which brought what lay at its partner. That lay there from the start,
        # unless an earlier swap, of a higher place, had brought it: the last of those, for places come downwards.
        at = int(self._partners[place])
        while True:
            later = self._first_partnered(at, place + 1)
            if later is None:
                return at
            at, place = later, later

    def _first_partnered(self, at: int, begin: int) -> int | None:
        """The lowest place from `begin` on whose partner is `at`."""
        while begin < len(self._partners):
            found = np.flatnonzero(self._partners[begin : begin + _BLOCK] == at)
            if len(found):
                return begin + int(found[0])
            begin += _BLOCK
        return None

    def order(self) -> NDArray[np.uint32]:
        """The numbers at all places."""
        numbers = list(range(len(self)))
        partners = self._partners.tolist()
        for place in range(len(numbers) - 1, 0, -1):
            partner = partners[place]
            numbers[place], numbers[partner] = numbers[partner], numbers[place]
        return np.array(numbers, dtype=np.uint32)


def _partners(length: int, seed: int) -> NDArray[np.uint32]:
    """[length] with which place each was swapped; place 0 with itself."""
    partners = np.zeros(length, dtype=np.uint32)
    source = np.random.MT19937()
    *key, position = random.Random(seed).getstate()[1]
    source.state = {"bit_generator": "MT19937", "state": {"key": np.array(key, dtype=np.uint32), "pos": position}}
    words = np.empty(0, dtype=np.uint32)
    top = length - 1
    while top > 0:
        if not len(words):
            words = source.random_raw(min(length, _BLOCK)).astype(np.uint32)
        bits = (top + 1).bit_length()
        wanted = top + 2 - (1 << (bits - 1))  # places that draw as many bits
        drawn = words[: 2 * wanted] >> np.uint32(32 - bits)
        accepted = np.flatnonzero(_accepted(drawn, top + 1))[:wanted]
        partners[top - np.arange(len(accepted))] = drawn[accepted]
        top -= len(accepted)
        words = words[int(accepted[-1]) + 1 if len(accepted) == wanted else len(drawn) :]
    return partners


def _accepted(drawn: NDArray[np.uint32], limit: int) -> NDArray[np.bool_]:
    """Which of the numbers drawn are below the limit, which goes down by one with each that is."""
    accepted = drawn < limit
    while True:
        # A guess that is right up to some number is right for one more after this.
        again = drawn < limit - (np.cumsum(accepted) - accepted)
        if np.array_equal(again, accepted):
            return accepted
        accepted = again
