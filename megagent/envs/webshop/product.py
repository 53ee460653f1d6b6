"""What the shop knows of one product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NO_PRICE = 100.0  # what a product without a price costs, in dollars


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """What a person wrote to ask for a product."""

    text: str
    attributes: tuple[str, ...]  # what the text asks for; without any, no goal is made of it
    options: tuple[str, ...]  # bare values


@dataclass(frozen=True, slots=True)
class Product:
    """One product, as pages, search and reward need it."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str
    product_category: str  # levels joined with U+203A
    query: str  # what the product was found with: its kind
    price_tag: str  # what the page shows
    prices: tuple[float, ...]  # one price, or the two ends of a range, dollars
    options: Mapping[str, tuple[str, ...]]  # name -> values, in page order, lower case
    attributes: tuple[str, ...]
    nouns: tuple[str, ...]  # of the title, lower case, in order
    instruction: str = ""  # empty: no goal asks for this product
    instruction_attributes: tuple[str, ...] = ()
    human: tuple[HumanInstruction, ...] = ()
