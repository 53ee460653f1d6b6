"""How alike two texts are by their sets of words, 0 to 100, as thefuzz 0.19 over difflib measures it."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import lru_cache

_LATIN1 = re.compile("[\u0080-\u00ff]")
_NO_WORD = re.compile(r"\W")


def _words(text: str) -> frozenset[str]:
    return frozenset(_NO_WORD.sub(" ", _LATIN1.sub("", text)).lower().split())


def _ratio(first: str, second: str) -> int:
    if not first or not second:
        return 0
    return round(100 * SequenceMatcher(None, first, second).ratio())


@lru_cache(maxsize=1 << 16)
def token_set_ratio(first: str, second: str) -> int:
    """The best of three comparisons: the shared words, and each side's shared and own words, sorted and joined.

    The order counts, as difflib finds other blocks from the other side: what is bought comes first.
    """
    one, other = _words(first), _words(second)
    if not one or not other:
        return 0
    shared = " ".join(sorted(one & other))
    left = f"{shared} {' '.join(sorted(one - other))}".strip()
    right = f"{shared} {' '.join(sorted(other - one))}".strip()
    return max(_ratio(shared, left), _ratio(shared, right), _ratio(left, right))
