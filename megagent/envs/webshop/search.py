"""Full-text search over the products in Lucene's order: BM25 over an inverted index of arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megagent.envs.webshop.analysis import terms
from megagent.envs.webshop.catalog import Product

K1 = 0.9  # Pyserini's defaults
B = 0.4
MOST_RESULTS = 50


def document(product: Product) -> str:
    """What the index knows of a product: title, description, the first bullet and the options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    bullet = product.bullets[0] if product.bullets else ""
    return " ".join((product.title, product.description, bullet, options)).lower()


def coded_length(length: int) -> int:
    """A document's length in terms, as one byte of Lucene keeps it: exact below 40, then four significant bits.

    Source: Lucene's SmallFloat.intToByte4 and byte4ToInt.
    """
    exact = 24  # values below it are themselves; above, 24 plus a float of three mantissa bits
    if length < exact:
        return length
    rest = length - exact
    shift = max(rest.bit_length() - 4, 0)
    return exact + (rest >> shift << shift)


class SearchIndex:
    """An inverted index: for each term the documents that hold it and its weight there without the idf.

    A term's documents are `documents[starts[t]:starts[t + 1]]`, ascending by asin.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        # Numbering by asin makes a stable sort by score break ties by asin, as Lucene does here.
        order = sorted(range(len(products)), key=lambda position: products[position].asin)
        counts = [Counter(terms(document(products[position]))) for position in order]
        lengths = [count.total() for count in counts]
        mean_length = sum(lengths) / max(len(lengths), 1)
        postings: dict[str, tuple[list[int], list[float]]] = {}
        for number, count in enumerate(counts):
            norm = K1 * ((1 - B) + B * coded_length(lengths[number]) / max(mean_length, 1e-9))
            for term, frequency in count.items():
                documents, saturations = postings.setdefault(term, ([], []))
                documents.append(number)
                saturations.append(1.0 - 1.0 / (1.0 + frequency / norm))
        self._positions: NDArray[np.int64] = np.array(order, dtype=np.int64)
        self._terms = {term: number for number, term in enumerate(postings)}
        sizes = [len(documents) for documents, _ in postings.values()]
        self._starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self._documents = np.array([d for documents, _ in postings.values() for d in documents], dtype=np.int32)
        self._saturations = np.array([s for _, weights in postings.values() for s in weights], dtype=np.float64)

    def search(self, query: str, most: int = MOST_RESULTS) -> list[int]:
        """Positions of the best matching products, best first, equal scores by asin; at most `most`.

        Only products that hold a term of the query are returned. Repeating a term multiplies its weight.
        """
        scores = np.zeros(len(self._positions))
        matched = False
        for term, repetitions in Counter(terms(query)).items():
            number = self._terms.get(term)
            if number is None:
                continue
            matched = True
            begin, end = self._starts[number], self._starts[number + 1]
            holders = end - begin
            idf = np.log(1 + (len(self._positions) - holders + 0.5) / (holders + 0.5))
            scores[self._documents[begin:end]] += repetitions * idf * self._saturations[begin:end]
        if not matched:
            return []
        found = np.flatnonzero(scores)
        best = found[np.argsort(-scores[found], kind="stable")[:most]]
        return [int(position) for position in self._positions[best]]
