"""A catalogue: the products of a shop with its search index and what it deals, over named arrays.

The arrays are in memory, made from products, or mapped from a file that `megagent shop build` wrote. Either way a
product is decoded when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megagent.envs.webshop.arrays import Arrays, read_arrays
from megagent.envs.webshop.build import assemble, open_source
from megagent.envs.webshop.config import EMBEDDED
from megagent.envs.webshop.lazy import LazySequence
from megagent.envs.webshop.nouns import RuleTagger
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.product_arrays import ProductReader
from megagent.envs.webshop.source import Reading
from megagent.envs.webshop.tagger import Tagger
from megagent.errors import CatalogError

_DECODED = 2048  # products that stay decoded: some 10 MB


class Catalog(LazySequence[Product]):
    """Products by position, and the arrays of their index ("search/...") and of their goals ("goals/...").

    A mapped catalogue is pickled as its path, so that processes of a node share one copy.
    """

    def __init__(self, arrays: Arrays, meta: Mapping[str, Any], source: str, path: Path | None = None) -> None:
        self.arrays = arrays
        self.meta = meta
        self.source = source  # what messages call it
        self.digest: str = meta["digest"]  # of the products
        self.noun_source: str = meta["noun_source"]  # the tagger's name
        self._path = path
        self._reader = ProductReader(arrays)
        self._decoded = lru_cache(_DECODED)(self._reader.product)

    @classmethod
    def load(cls, name: str | Path) -> Catalog:
        """The catalogue of a name: `embedded`, a folder in the original's schema, or a file that was built from one.

        The titles of a folder are tagged by rule: what has a better tagger's nouns is a file built with one.
        Raises CatalogError if there is none, or with all faults of the folder's files.
        """
        path = Path(os.path.expanduser(name))  # Path's own questions raise for names that cannot be
        if str(name) != EMBEDDED and os.path.isfile(path):
            return cls.open(path)
        with closing(open_source(EMBEDDED if str(name) == EMBEDDED else path)) as source:
            reading = Reading(source, RuleTagger())
            arrays, digest = assemble(reading)
            return cls(arrays, _meta(arrays, digest, reading.noun_source), str(name))

    @classmethod
    def open(cls, path: str | Path) -> Catalog:
        """Maps a built catalogue, which costs the same whatever its size.

        Raises CatalogError if the file is missing, of another kind or version, cut short or damaged in its header.
        """
        path = Path(path).absolute()
        arrays, meta = read_arrays(path)
        try:
            return cls(arrays, meta, str(path), path)
        except KeyError as error:
            raise CatalogError(f"{path}: the catalogue has no {error}; build it again") from None

    @classmethod
    def of(cls, products: Iterable[Product], tagger: Tagger | None = None, source: str = "products") -> Catalog:
        """A catalogue in memory. Given a tagger, titles of products without nouns are tagged."""
        if tagger:
            products = [replace(p, nouns=p.nouns or tagger.nouns([p.title])[0]) for p in products]
        arrays, digest = assemble(products)
        return cls(arrays, _meta(arrays, digest, tagger.name if tagger else "given"), source)

    def position(self, asin: str) -> int | None:
        """Where the product with an asin is; None if there is none."""
        return self._reader.position(asin)

    def __len__(self) -> int:
        return len(self._reader)

    def _at(self, index: int) -> Product:
        return self._decoded(index)

    def __iter__(self) -> Iterator[Product]:
        # Past the decoded ones: a walk over all products must not push out those that are in use.
        return map(self._reader.product, range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path:
            return Catalog.open, (self._path,)
        return Catalog, (dict(self.arrays), dict(self.meta), self.source)


def _meta(arrays: Mapping[str, np.ndarray], digest: str, noun_source: str) -> dict[str, Any]:
    return {"products": len(arrays["products/asins"]), "digest": digest, "noun_source": noun_source}
