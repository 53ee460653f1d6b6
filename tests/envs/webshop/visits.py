"""Visits to a small shop, for tests."""

from __future__ import annotations

from typing import Any

from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.rules import HONEST, Rules
from megagent.envs.webshop.search import SearchIndex
from megagent.envs.webshop.session import Session, Shop
from megagent.envs.webshop.source import Records, products_of

from .conftest import entry, item

OPTIONS = {"Size": [{"value": "S"}, {"value": "L"}], "Color": [{"value": "Red"}, {"value": "Blue"}]}


def visit(rules: Rules = HONEST, count: int = 5, rich: bool = False, **fields: Any) -> Session:
    """A shop of `count` equal products B1, B2, ..., two on a page, and someone who wants B1 in red and s."""
    items = [item(f"B{number}", **{"customization_options": OPTIONS, **fields}) for number in range(1, count + 1)]
    catalog = Catalog.of(products_of(Records(items, {element["asin"]: entry() for element in items})))
    prices = [product.prices[0] for product in catalog]
    shop = Shop(catalog, SearchIndex(catalog.arrays), lambda seed: prices, 2, 50, rules, rich)
    return Session(shop, Goal(catalog[0], "find it", ("washable",), (("color", "red"), ("size", "s")), 20.0))


def acted(session: Session, *actions: str) -> Session:
    for action in actions:
        session.act(action)
    return session
