"""Small catalogues for tests of goals and panels."""

from __future__ import annotations

from typing import Any

from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.product import Product


def product(asin: str, **fields: Any) -> Product:
    """A product that goals are made of, with `fields` instead of its own."""
    own: dict[str, Any] = {
        "asin": asin,
        "title": "Blue Cotton Shirt",
        "description": "A shirt.",
        "bullets": ("washable",),
        "category": "fashion",
        "product_category": "Clothing \u203a Shirts",
        "query": "shirts",
        "price_tag": "$10.5",
        "prices": (10.5,),
        "options": {"size": ("s", "m"), "color": ("red", "blue", "green")},
        "attributes": ("washable", "light"),
        "nouns": ("cotton", "shirt"),
        "instruction": "Find me washable shirts",
        "instruction_attributes": ("washable",),
    }
    return Product(**{**own, **fields})


def shelf(count: int, **fields: Any) -> Catalog:
    """A catalogue of `count` products that differ in their asin."""
    return Catalog.of([product(f"B{number}", **fields) for number in range(count)])
