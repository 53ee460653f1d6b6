"""Products as arrays: one record of text each, behind an index of offsets and one by asin.

    products/records   the records, one after the other, UTF-8
    products/starts    where each begins, and the end of the last
    products/sums      CRC-32 of each
    products/asins     asin of each, in file order
    products/by_asin   positions in the order of the asins

A record is the product's fields in order. No text holds control characters, so those of ASCII that were made to
separate do it, and decoding a record is little more than splitting it. Its sum is checked whenever it is decoded: a
changed bit in a text would be another reward, and nobody would know.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megagent.envs.webshop.arrays import Arrays, GrowingArray
from megagent.envs.webshop.product import HumanInstruction, Product
from megagent.errors import CatalogError

_FIELD, _ELEMENT, _GROUP, _PART = "\x1e", "\x1f", "\x1d", "\x1c"
_FIELDS = 15


def encode(product: Product) -> bytes:
    """The record of a product. Raises CatalogError if a text of it holds characters that are no text."""
    p = product
    groups = [_listed((name, *values)) + _GROUP for name, values in p.options.items()]
    asked = [_PART.join((h.text, _listed(h.attributes), _listed(h.options))) + _GROUP for h in p.human]
    text = _FIELD.join(
        (
            p.asin,
            p.title,
            p.description,
            _listed(p.bullets),
            p.category,
            p.product_category,
            p.query,
            p.price_tag,
            _listed([repr(price) for price in p.prices]),
            "".join(groups),
            _listed(p.attributes),
            _listed(p.nouns),
            p.instruction,
            _listed(p.instruction_attributes),
            "".join(asked),
        )
    )
    elements = (
        sum(map(len, (p.bullets, p.prices, p.options, p.attributes, p.nouns, p.instruction_attributes)))
        + sum(map(len, p.options.values()))
        + sum(len(h.attributes) + len(h.options) for h in p.human)
    )
    separators = (_FIELDS - 1, elements, len(p.options) + len(p.human), 2 * len(p.human))
    if tuple(map(text.count, (_FIELD, _ELEMENT, _GROUP, _PART))) != separators:
        raise CatalogError(f"product {p.asin}: a text of it holds control characters; remove them")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CatalogError(f"product {p.asin}: a text of it is not Unicode ({error.reason}); correct it") from None


def decode(record: bytes) -> Product:
    """The product of a record that `encode` made."""
    asin, title, description, bullets, category, product_category, query, tag, prices, options, *rest = (
        record.decode().split(_FIELD)
    )
    attributes, nouns, instruction, instruction_attributes, human = rest
    return Product(
        asin,
        title,
        description,
        _parted(bullets),
        category,
        product_category,
        query,
        tag,
        tuple(map(float, _parted(prices))),
        {name: tuple(values) for name, *values in map(_parted, options.split(_GROUP)[:-1])},
        _parted(attributes),
        _parted(nouns),
        instruction,
        _parted(instruction_attributes),
        tuple(_human(group) for group in human.split(_GROUP)[:-1]) if human else (),
    )


def _human(group: str) -> HumanInstruction:
    text, attributes, options = group.split(_PART)
    return HumanInstruction(text, _parted(attributes), _parted(options))


def _listed(texts: Iterable[str]) -> str:
    # Every element is closed, not only set apart, so that no element and one empty element differ.
    return "".join([f"{text}{_ELEMENT}" for text in texts])


def _parted(text: str) -> tuple[str, ...]:
    return tuple(text.split(_ELEMENT)[:-1])


class ProductArrays:
    """Builds the arrays of products that are added one at a time; in memory it takes 94 bytes a product."""

    def __init__(self, scratch: Path | None) -> None:
        self._records = GrowingArray(scratch, "products/records", "u1")
        self._starts = array("Q", [0])
        self._sums = array("I")
        self._asins: list[bytes] = []
        self._hash = hashlib.sha256()

    def add(self, product: Product) -> None:
        self.add_record(encode(product))

    def add_record(self, record: bytes) -> None:
        """Adds a product that is encoded already."""
        self._records.append(record)
        self._starts.append(self._starts[-1] + len(record))
        self._sums.append(zlib.crc32(record))
        self._asins.append(record[: record.index(_FIELD.encode())])
        self._hash.update(record)

    @property
    def digest(self) -> str:
        """A hash of all that was added, in order."""
        return self._hash.hexdigest()

    def finish(self) -> dict[str, np.ndarray]:
        asins = np.array(self._asins, dtype="S")
        return {
            "products/records": self._records.finish(),
            "products/starts": np.array(self._starts, np.uint64),
            "products/sums": np.array(self._sums, np.uint32),
            "products/asins": asins,
            "products/by_asin": np.argsort(asins, kind="stable").astype(np.uint32),
        }


class ProductReader:
    """Products out of arrays, decoded one at a time."""

    def __init__(self, arrays: Arrays) -> None:
        # Plain buffers: taking one number out of them costs a tenth of what it does out of an array.
        self._records = arrays["products/records"].data
        self._starts = arrays["products/starts"].data
        self._sums = arrays["products/sums"].data
        self._asins = arrays["products/asins"]
        self._by_asin = arrays["products/by_asin"]

    def __len__(self) -> int:
        return len(self._asins)

    def product(self, position: int) -> Product:
        """The product at a position from 0. Raises CatalogError if its record is damaged."""
        record = bytes(self._records[self._starts[position] : self._starts[position + 1]])
        if zlib.crc32(record) != self._sums[position]:
            raise CatalogError(f"the catalogue's record of product {position} is damaged; build it again")
        return decode(record)

    def position(self, asin: str) -> int | None:
        """Where the product with an asin is; None if there is none. Raises CatalogError if the order is damaged."""
        raw = asin.encode("utf-8", "surrogatepass")
        if len(raw) > self._asins.itemsize or raw.endswith(b"\0"):  # what a fixed width would cut off
            return None
        wanted = np.array(raw, self._asins.dtype)
        try:
            at = int(np.searchsorted(self._asins, wanted, sorter=self._by_asin))
        except ValueError as error:
            raise CatalogError(f"the catalogue's order of asins is damaged ({error}); build it again") from None
        if at == len(self):
            return None
        position = int(self._by_asin[at])
        return position if self._asins[position] == wanted else None
