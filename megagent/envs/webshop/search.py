"""Full-text search over the products in Lucene's order: BM25 over an inverted index of arrays.

The score of a document is the sum, over the query's terms, of weight - weight / level, each in float32 as Lucene has
it, added in float64 and rounded to float32; equal scores are in the order of the asin. Large catalogues are searched
by MaxScore (Turtle and Flood, 1995): once the documents of the rarer terms are scored, the terms left over may not
suffice to bring in a new one, and are only looked up for the documents that can still be among the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagent.envs.webshop.analysis import terms
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.search_build import IndexBuilder, encoded, term_hash
from megagent.errors import CatalogError

MOST_RESULTS = 50
MOST_TERMS = 1024  # distinct terms of a query; Lucene refuses more, here the later ones are ignored
_SMALL = 1 << 15  # documents; below, scoring every holder of a term costs less than to choose
_GROUPS = 1024
_LOOKUP_COST = 8  # to look up one document in a term's list costs as much as to add the points of so many
_HIGHEST_BAR = 0.7  # of the sum of the bounds; even the best results seldom score more
# Bounds are kept in float32, and ties of rounded scores count: what is this close to the bar is scored exactly.
_SLACK = 2.0**-22
_ABOVE_ZERO = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A term of a query that some document holds."""

    weight: np.float32  # repetitions * idf
    documents: NDArray[np.int32]  # [holders] ascending
    codes: NDArray[Any]  # [holders]
    bound: float  # the most that it adds to a score


class SearchIndex:
    """Searches the arrays of `IndexBuilder.finish`, in memory or memory-mapped."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        # Plain views: slices of np.memmap objects cost ten times as much.
        self._positions = np.asarray(arrays["search/positions"])
        self._hashes = np.asarray(arrays["search/hashes"])
        self._ends = np.asarray(arrays["search/ends"])
        self._text = np.asarray(arrays["search/text"])
        self._starts = np.asarray(arrays["search/starts"])
        self._holders = np.asarray(arrays["search/holders"])
        self._best = np.asarray(arrays["search/best"])
        self._documents = np.asarray(arrays["search/documents"])
        self._codes = np.asarray(arrays["search/codes"])
        self._levels = np.asarray(arrays["search/levels"])

    @classmethod
    def of(cls, products: Iterable[Product]) -> SearchIndex:
        """An index of `products` in memory."""
        builder = IndexBuilder()
        for product in products:
            builder.add(product)
        return cls(builder.finish())

    def search(self, query: str, most: int = MOST_RESULTS) -> list[int]:
        """Positions of the best matching products, best first, equal scores by asin; at most `most`.

        Only products that hold a term of the query are returned. Repeating a term multiplies its weight; distinct terms
        beyond the first 1,024 are ignored. Raises CatalogError if the index is damaged where the query needs it.
        """
        try:
            asked = self._asked(query)
            if not asked or most < 1:
                return []
            if len(self._positions) <= _SMALL:
                return self._ordered(*self._score_all(asked), most)
            return self._ordered(*self._score_best(asked, most), most)
        except IndexError as error:
            raise CatalogError(f"the catalogue's search index is damaged ({error}); build it again") from None

    def search_all(self, query: str, most: int = MOST_RESULTS) -> list[int]:
        """As `search`, always by scoring every holder of a term: the slow way that the fast one is held against."""
        return self._ordered(*self._score_all(self._asked(query)), most)

    def _ordered(self, found: NDArray[Any], scores: NDArray[np.float32], most: int) -> list[int]:
        # Documents are numbered by asin, and the sort is stable: so are ties.
        best = found[np.argsort(-scores, kind="stable")[:most]]
        positions: list[int] = self._positions[best].tolist()
        if positions and not 0 <= min(positions) <= max(positions) < len(self._positions):
            raise IndexError(f"it has products {min(positions)} to {max(positions)} of {len(self._positions)}")
        return positions

    def _asked(self, query: str) -> list[_Asked]:
        """The terms of `query` that are in the index, in the order of the query."""
        counts = Counter(terms(query))
        texts = [encoded(term) for term in islice(counts, MOST_TERMS)]
        hashes = np.array([term_hash(text) for text in texts], dtype=np.uint64)
        numbers = np.searchsorted(self._hashes, hashes).tolist()
        total = len(self._positions)
        asked = []
        for text, wanted, number, repetitions in zip(texts, hashes, numbers, counts.values(), strict=False):
            while number < len(self._hashes) and self._hashes[number] == wanted:
                begin = self._ends[number - 1] if number else 0
                if self._text[begin : self._ends[number]].tobytes() == text:
                    start, holders = int(self._starts[number]), int(self._holders[number])
                    idf = np.float32(np.log(1 + (total - holders + 0.5) / (holders + 0.5)))
                    weight = np.float32(repetitions) * idf
                    own = slice(start, start + holders)
                    bound = float(weight - weight / self._levels[self._best[number]])
                    asked.append(_Asked(weight, self._documents[own], self._codes[own], bound))
                    break
                number += 1
        return asked

    def _points(self, asked: _Asked, codes: NDArray[Any]) -> NDArray[np.float32]:
        """[codes] what a term adds to the scores of documents with `codes`."""
        if len(codes) < len(self._levels):
            return asked.weight - asked.weight / self._levels[codes]
        return (asked.weight - asked.weight / self._levels)[codes]

    def _score_all(self, asked: Sequence[_Asked]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Every document that holds a term, ascending, and its score."""
        sums = np.zeros(len(self._positions))
        for term in asked:
            sums[term.documents] += self._points(term, term.codes)
        found = np.flatnonzero(sums)
        return found, sums[found].astype(np.float32)

    def _score_best(self, asked: Sequence[_Asked], most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The documents that may be among the best `most`, ascending, and their scores."""
        found = self._candidates(asked, most)
        sums = np.zeros(len(found))
        for term in asked:
            places, hits = _lookup(term.documents, found)
            sums[hits] += self._points(term, term.codes[places])
        return found, sums.astype(np.float32)

    def _candidates(self, asked: Sequence[_Asked], most: int) -> NDArray[np.int32]:
        """Documents, ascending, that hold at least the best `most` by score."""
        sums = np.zeros(len(self._positions), dtype=np.float32)
        order = sorted(asked, key=lambda term: -term.bound)
        slack = 1 - _SLACK * (len(order) + 2)
        total = ahead = sum(term.bound for term in order)  # ahead: the most that a document not yet met can score
        bar = 0.0  # at least `most` documents score this
        scanned = 0
        for term in order:
            if ahead < bar * slack:
                possible = np.count_nonzero(sums >= bar * slack - ahead)
                if possible * _LOOKUP_COST < len(term.documents):
                    break
            sums[term.documents] += self._points(term, term.codes)
            scanned += 1
            ahead -= term.bound
            if bar * slack <= ahead < _HIGHEST_BAR * total:
                bar = max(bar, self._probe(sums, term.documents, order[scanned:], most))
        found = np.flatnonzero(sums >= max(bar * slack - ahead, _ABOVE_ZERO)).astype(np.int32)
        own = sums[found]
        for term in order[scanned:]:
            places, hits = _lookup(term.documents, found)
            own[hits] += self._points(term, term.codes[places])
            ahead -= term.bound
            bar = max(bar, _bar(own, most))
            kept = own >= bar * slack - ahead
            found, own = found[kept], own[kept]
        return found

    def _probe(
        self, sums: NDArray[np.float32], documents: NDArray[np.int32], ahead: Sequence[_Asked], most: int
    ) -> float:
        """A score that `most` of `documents` reach or exceed; the terms `ahead` are looked up for a promising few."""
        own = sums[documents]
        promising = np.sort(_promising(own, 2 * most))
        found, own = documents[promising], own[promising]
        for term in ahead:
            places, hits = _lookup(term.documents, found)
            own[hits] += self._points(term, term.codes[places])
        return _bar(own, most)


def _bar(sums: NDArray[np.float32], most: int) -> float:
    """The sum that `most` of `sums` reach; 0 if there are too few."""
    return float(np.partition(sums, len(sums) - most)[len(sums) - most]) if len(sums) >= most else 0.0


def _promising(sums: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Places of about `count` of the highest sums."""
    if len(sums) <= count:
        return np.arange(len(sums))
    if len(sums) >= 8 * _GROUPS and count <= _GROUPS // 4:
        # Only the best of each group is looked at: to find these needs no sorting.
        rows = len(sums) // _GROUPS
        best = sums[: rows * _GROUPS].reshape(_GROUPS, rows).argmax(axis=1) + np.arange(_GROUPS) * rows
        return best[np.argpartition(sums[best], _GROUPS - count)[_GROUPS - count :]]
    return np.argpartition(sums, len(sums) - count)[len(sums) - count :]


def _lookup(documents: NDArray[np.int32], wanted: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where in `documents` the `wanted` ones are, and which of the wanted these are. Both ascending."""
    places = np.searchsorted(documents, wanted)
    places[places == len(documents)] = 0
    hits = np.flatnonzero(documents[places] == wanted)
    return places[hits], hits
