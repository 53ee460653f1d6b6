"""What each page of the shop says and offers.

The text is the original's `text` mode: the visible texts in order, joined with " [SEP] ". Pages are built as text from
the start; there is no HTML in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from megagent.envs.webshop.catalog import Product
from megagent.envs.webshop.rules import Rules

SEPARATOR = " [SEP] "
SEARCH_BOX = "search[<your query>]"

BACK = "Back to Search"
PREVIOUS = "< Prev"
NEXT = "Next >"
BUY = "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")

_RESERVED = frozenset(text.lower() for text in (BACK, PREVIOUS, NEXT, BUY, *SUB_PAGES, "Attributes", "Search"))


def search_segments() -> list[str]:
    return ["Search"]


def results_segments(products: Sequence[Product], page: int, total: int) -> list[str]:
    """A page of results; page counts from 1, total is the number of hits on all pages."""
    head = [BACK, f"Page {page} (Total results: {total})", *([PREVIOUS] if page > 1 else []), NEXT]
    return head + [text for p in products for text in (p.asin, *_nodes(p.title), p.price_tag)]


def item_segments(product: Product, chosen: Mapping[str, str], rules: Rules) -> list[str]:
    """A product with its options; what is selected is said after them, in the options' order."""
    labels = {choice: label for label, choice in option_labels(product, rules).items()}
    segments = [BACK, PREVIOUS]
    for name, values in product.options.items():
        segments += [name, *(node for value in values for node in _nodes(labels.get((name, value), value)))]
    selected = ", ".join(f"{name} {chosen[name]}" for name in product.options if name in chosen)
    if selected and rules.shows_selection:
        segments.append(f"Selected: {selected}")
    return [*segments, *_nodes(product.title), f"Price: {product.price_tag}", "Rating: N.A.", *SUB_PAGES, BUY]


def sub_page_segments(product: Product, name: str) -> list[str]:
    """The description, the features or the reviews (of which the catalogue holds none)."""
    texts: Sequence[str] = ()
    if name == "description":
        texts = [product.description]
    elif name == "features":
        texts = [f" {bullet} " for bullet in product.bullets]  # the original's page pads them, so none is dropped
    return [BACK, PREVIOUS, *(node for text in texts for node in _nodes(text))]


def _nodes(text: str) -> list[str]:
    """The segment that a text makes, if any: none if it is empty, or blank with a line break."""
    return [text.strip()] if text.strip() or (text and "\n" not in text) else []


def done_text(product: Product, chosen: dict[str, str], score: float) -> str:
    """The page after a purchase, which no agent acts on."""
    segments = [
        *("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)"),
        *("Purchased", "asin", product.asin, "options", json.dumps(chosen, sort_keys=True), "attrs", "None"),
        *("category", "None", "query", "None", "product category", "None"),
        # "instuction" is the original's spelling.
        *("Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"),
        *("query", "Goal", "None", "Reward", "Your score (min 0.0, max 1.0)", str(score), "Reward Details", "None"),
    ]
    return SEPARATOR.join(segments)


def option_labels(product: Product, rules: Rules) -> dict[str, tuple[str, str]]:
    """What can be clicked to select an option: label -> (name, value), in page order."""
    named = [(name, value) for name, values in product.options.items() for value in dict.fromkeys(values)]
    if not rules.tells_values_apart:
        return {value: (name, value) for name, value in named}
    times: dict[str, int] = {}
    for _, value in named:
        times[value] = times.get(value, 0) + 1
    labels: dict[str, tuple[str, str]] = {}
    for name, value in named:
        plain = times[value] == 1 and value and value not in _RESERVED
        labels[value if plain else f"{name}: {value}"] = (name, value)
    return labels


def anchor(segments: Sequence[str]) -> str:
    """The page as the agent sees it: each segment in single quotes, without the task."""
    return SEPARATOR.join(f"'{segment}'" for segment in segments)
