"""Builds the inverted index that search reads, one product at a time, in bounded memory.

Terms are numbered as they appear. Postings (term, document, frequency) are collected into runs, sorted and, given a
scratch folder, kept there; at the end the runs are merged bucket by bucket of terms.

    search/positions  [documents]  int32    file position of each document; documents are numbered by asin
    search/hashes     [terms]      uint64   of the terms' texts, ascending: what a query's term is looked up by
    search/ends       [terms]      int64    end of each term's UTF-8 text in search/text, in the order of the hashes
    search/text       [bytes]      uint8
    search/starts     [terms]      int64    a term's postings are [start, start + holders), ascending by document
    search/holders    [terms]      int32
    search/best       [terms]      uint16   the lowest code among a term's postings
    search/documents  [postings]   int32
    search/codes      [postings]   uint16   which level (uint32 in a catalogue with more than 65,536 levels)
    search/levels     [codes]      float32  1 + frequency / norm(length), descending

Source: the arithmetic, float32 included, is that of Lucene 8's BM25Similarity; so are, therefore, its ties.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagent.envs.webshop.analysis import piece_terms, pieces
from megagent.envs.webshop.arrays import GrowingArray
from megagent.envs.webshop.product import Product

K1 = np.float32(0.9)  # Pyserini's defaults
B = np.float32(0.4)
_RUN_TOKENS = 1 << 23  # tokens of a run: 32 MiB of numbers, five times that while it is sorted
_BUCKET_POSTINGS = 1 << 22
_CACHED_PIECES = 1 << 18
_CACHED_LENGTH = 40  # characters; longer pieces seldom come again
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


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


def term_hash(text: bytes) -> int:
    """64 bits that a term is looked up by; terms that share them are told apart by their text."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def encoded(term: str) -> bytes:
    """A term's text as the index keeps it. A query may hold halves of surrogate pairs; no product does."""
    return term.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class _Run:
    """Postings of consecutive products, ascending by term, then by file position."""

    terms: NDArray[np.int32]  # [terms of the run] ascending
    begins: NDArray[np.int64]  # [terms of the run + 1] of their postings
    documents: NDArray[np.int32] | Path  # [postings] int32, or the file of them
    frequencies: NDArray[np.int32] | Path

    def between(self, first: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Terms, documents and frequencies, [postings] each, of the terms from `first` up to `last`."""
        low, high = np.searchsorted(self.terms, np.array([first, last], dtype=np.int32))
        begin, end = int(self.begins[low]), int(self.begins[high])
        terms = np.repeat(self.terms[low:high], np.diff(self.begins[low : high + 1]))
        return terms, _read(self.documents, begin, end), _read(self.frequencies, begin, end)


def _read(kept: NDArray[np.int32] | Path, begin: int, end: int) -> NDArray[np.int32]:
    # Not mapped: what is mapped counts as this process's memory.
    if isinstance(kept, Path):
        return np.fromfile(kept, dtype=np.int32, count=end - begin, offset=begin * 4)
    return kept[begin:end]


class IndexBuilder:
    """Takes products in file order and gives the arrays of their index.

    Memory: the dictionary of terms (about 200 bytes a term), 20 bytes a product, and 400 MiB at most for runs and
    buckets; without a scratch folder the postings too. With one, the large arrays are memory maps of files in it.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._terms: dict[str, int] = {}
        self._pieces: dict[str, tuple[int, ...]] = {}
        self._tokens = array("i")  # term numbers of the products since the last run
        self._lengths = array("i")
        self._asins: list[bytes] = []
        self._run_lengths: list[NDArray[np.int32]] = []
        self._run_asins: list[NDArray[np.bytes_]] = []
        self._runs: list[_Run] = []
        self._documents = 0  # in runs
        self._seen = np.zeros(0, dtype=np.uint64)  # pairs of coded length and frequency

    def add(self, product: Product) -> None:
        """Takes the next product of the file."""
        numbers: list[int] = []
        known = self._pieces
        for piece in pieces(document(product)):
            found = known.get(piece)
            numbers += self._numbers(piece) if found is None else found
        self._tokens.extend(numbers)
        self._lengths.append(len(numbers))
        self._asins.append(encoded(product.asin))
        if len(self._tokens) >= _RUN_TOKENS:
            self._end_run()

    def finish(self) -> dict[str, NDArray[Any]]:
        """The arrays of the module's description. The builder is spent after it."""
        self._end_run()
        self._pieces.clear()
        positions = np.argsort(np.concatenate([np.zeros(0, "S1"), *self._run_asins]), kind="stable")
        ranks = np.empty(len(positions), dtype=np.uint64)
        ranks[positions] = np.arange(len(positions), dtype=np.uint64)
        lengths = np.concatenate([np.zeros(0, np.int32), *self._run_lengths])
        holders = np.zeros(len(self._terms), dtype=np.int64)
        for run in self._runs:
            holders[run.terms] += np.diff(run.begins)
        starts = np.cumsum(holders) - holders
        levels, code_of_pair = self._levels(lengths)
        documents, codes, best = self._merge(ranks, _coded(lengths), holders, starts, code_of_pair)
        by_hash, hashes, ends, text = self._dictionary()
        return {
            "search/positions": positions.astype(np.int32),
            "search/hashes": hashes,
            "search/ends": ends,
            "search/text": text,
            "search/starts": starts[by_hash],
            "search/holders": holders[by_hash].astype(np.int32),
            "search/best": best[by_hash],
            "search/documents": documents,
            "search/codes": codes,
            "search/levels": levels,
        }

    def _numbers(self, piece: str) -> tuple[int, ...]:
        terms = self._terms
        numbers = tuple(terms.setdefault(term, len(terms)) for term in piece_terms(piece))
        if len(piece) <= _CACHED_LENGTH:
            if len(self._pieces) >= _CACHED_PIECES:
                self._pieces.clear()
            self._pieces[piece] = numbers
        return numbers

    def _end_run(self) -> None:
        """Turns the tokens since the last run into sorted postings."""
        lengths = np.array(self._lengths, dtype=np.int32)
        if not len(lengths):
            return
        own = np.arange(self._documents, self._documents + len(lengths), dtype=np.uint64)
        keys = np.array(self._tokens, dtype=np.uint64)
        keys <<= _HALF
        keys |= np.repeat(own, lengths)
        keys.sort()
        firsts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else np.zeros(0, np.int64)
        frequencies = np.diff(firsts, append=len(keys)).astype(np.int32)
        keys = keys[firsts]
        documents = (keys & _LOW).astype(np.int32)
        pairs = _pairs(_coded(lengths)[documents - self._documents], frequencies)
        self._seen = np.union1d(self._seen, pairs)
        distinct, begins = np.unique((keys >> _HALF).astype(np.int32), return_index=True)
        self._runs.append(
            _Run(
                terms=distinct,
                begins=np.append(begins, len(keys)),
                documents=self._kept("documents", documents),
                frequencies=self._kept("frequencies", frequencies),
            )
        )
        self._run_lengths.append(lengths)
        self._run_asins.append(np.array(self._asins))
        self._documents += len(lengths)
        self._tokens, self._lengths, self._asins = array("i"), array("i"), []

    def _kept(self, name: str, values: NDArray[np.int32]) -> NDArray[np.int32] | Path:
        if self._scratch is None:
            return values
        path = self._scratch / f"search-run-{len(self._runs)}-{name}"
        values.tofile(path)
        return path

    def _levels(self, lengths: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """[codes] levels, descending, and [pairs] the code of each pair in `_seen`."""
        one = np.float32(1)
        mean = np.float32(max(int(lengths.sum(dtype=np.int64)), 1) / max(len(lengths), 1))
        coded = (self._seen >> _HALF).astype(np.float32)
        inverse = one / (K1 * ((one - B) + B * coded / mean))
        levels = one + (self._seen & _LOW).astype(np.float32) * inverse
        order = np.argsort(-levels, kind="stable")
        code_of_pair = np.empty(len(order), dtype=np.uint64)
        code_of_pair[order] = np.arange(len(order), dtype=np.uint64)
        return levels[order], code_of_pair

    def _merge(
        self,
        ranks: NDArray[np.uint64],
        coded: NDArray[np.int64],
        holders: NDArray[np.int64],
        starts: NDArray[np.int64],
        code_of_pair: NDArray[np.uint64],
    ) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[Any]]:
        """Postings of all runs, by term and then by document number: [postings], [postings] and [terms]."""
        code_type = np.uint16 if len(code_of_pair) <= 1 << 16 else np.uint32
        documents = GrowingArray(self._scratch, "search-documents", np.int32)
        codes = GrowingArray(self._scratch, "search-codes", code_type)
        best = np.zeros(len(holders), dtype=code_type)
        # A posting as one number, term and document and code, sorts by itself.
        code_bits = np.uint64(len(code_of_pair).bit_length())
        document_bits = np.uint64(len(ranks).bit_length())
        most_terms = 1 << (64 - int(code_bits + document_bits))
        bounds = np.append(starts, holders.sum())
        first = 0
        while first < len(holders):
            last = int(np.searchsorted(bounds, bounds[first] + _BUCKET_POSTINGS, side="right")) - 1
            last = min(max(last, first + 1), first + most_terms)
            parts = []
            for run in self._runs:
                terms, own, frequencies = run.between(first, last)
                keys = (terms - np.int32(first)).astype(np.uint64) << document_bits
                keys |= ranks[own]
                keys <<= code_bits
                keys |= code_of_pair[np.searchsorted(self._seen, _pairs(coded[own], frequencies))]
                parts.append(keys)
            keys = np.concatenate(parts)
            keys.sort()
            bucket_codes = keys & _ones(code_bits)
            codes.append(bucket_codes)
            documents.append(keys >> code_bits & _ones(document_bits))
            best[first:last] = np.minimum.reduceat(bucket_codes, bounds[first:last] - bounds[first])
            first = last
        for run in self._runs:
            for kept in (run.documents, run.frequencies):
                if isinstance(kept, Path):
                    kept.unlink()
        self._runs.clear()
        return documents.finish(), codes.finish(), best

    def _dictionary(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint8]]:
        """Term numbers by hash, and in that order the hashes, the ends of the texts and the texts."""
        texts = [encoded(term) for term in self._terms]
        self._terms.clear()
        hashes = np.fromiter(map(term_hash, texts), dtype=np.uint64, count=len(texts))
        by_hash = np.argsort(hashes, kind="stable")
        ordered = [texts[number] for number in by_hash]
        ends = np.cumsum(np.fromiter(map(len, ordered), dtype=np.int64, count=len(ordered)))
        return by_hash, hashes[by_hash], ends, np.frombuffer(b"".join(ordered), dtype=np.uint8)


def _ones(count: np.uint64) -> np.uint64:
    return (np.uint64(1) << count) - np.uint64(1)


def _coded(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """`coded_length` of each."""
    distinct, inverse = np.unique(lengths, return_inverse=True)
    return np.array([coded_length(int(length)) for length in distinct], dtype=np.int64)[inverse]


def _pairs(coded: NDArray[np.int64], frequencies: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Coded length and frequency as one number each."""
    return coded.astype(np.uint64) << _HALF | frequencies.astype(np.uint64)
