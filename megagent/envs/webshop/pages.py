"""What each page of the shop says and offers, in the original's two modes.

text: the visible texts in order, joined with " [SEP] ". text_rich: one line each, buttons in brackets. Pages are built
as text from the start; there is no HTML in between. Blank texts are kept or dropped as the original's parser does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megagent.envs.webshop.product import Product
from megagent.envs.webshop.rules import Rules

SEPARATOR = " [SEP] "
SEARCH_BOX = "search[<your query>]"

BACK = "Back to Search"
PREVIOUS = "< Prev"
NEXT = "Next >"
BUY = "Buy Now"
SEARCH = "Search"
SUB_PAGES = ("Description", "Features", "Reviews")

_RESERVED = frozenset(text.lower() for text in (BACK, PREVIOUS, NEXT, BUY, SEARCH, *SUB_PAGES, "Attributes"))


class Part(NamedTuple):
    """One visible text of a page."""

    kind: Literal["text", "button", "option", "product"]
    text: str
    clicked: bool = False  # an option that is selected, a product that was opened


_BACK, _PREVIOUS, _NEXT = (Part("button", label) for label in (BACK, PREVIOUS, NEXT))
SEARCH_PARTS = (Part("button", SEARCH),)


def _texts(text: str) -> list[Part]:
    """The part that a text makes, if any: none if it is empty, or blank with a line break."""
    if text.strip():
        return [Part("text", text)]
    return [Part("text", " ")] if text and "\n" not in text else []


@dataclass(frozen=True, slots=True)
class Card:
    """A product on a page of results."""

    position: int  # in the catalogue
    asin: str
    parts: tuple[Part, ...]  # after the asin
    text: str  # the whole card in text mode


def card(product: Product, position: int) -> Card:
    """A product as pages of results show it. position: in the catalogue."""
    parts = (*_texts(product.title), *_texts(product.price_tag))
    return Card(position, product.asin, parts, quoted([Part("product", product.asin), *parts]))


@dataclass(frozen=True, slots=True)
class Item:
    """The page of a product: what stays the same at every visit."""

    product: Product
    position: int
    choices: Mapping[str, tuple[str, str]]  # what a click on an option's label selects: label -> (name, value)
    options: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]  # (name, ((value, label), ...)) in page order
    clickables: tuple[str, ...]
    actions: tuple[str, ...]
    tail: tuple[Part, ...]
    head_text: str  # in text mode, up to the options
    tail_text: str


def item(product: Product, position: int, rules: Rules) -> Item:
    """The page of a product, with what can be clicked there under these rules. position: in the catalogue."""
    choices = option_labels(product, rules)
    labels = {choice: label for label, choice in choices.items()}
    options = tuple(
        (name, tuple((value, labels.get((name, value), value)) for value in values))
        for name, values in product.options.items()
    )
    tail = (
        *_texts(product.title),
        *_texts(f"Price: {product.price_tag}"),
        Part("text", "Rating: N.A."),
        *(Part("button", name) for name in (*SUB_PAGES, BUY)),
    )
    buttons = [label.lower() for label in (BACK, PREVIOUS, *SUB_PAGES, BUY)]
    clickables = tuple(dict.fromkeys([*buttons, *choices]))
    head = [_BACK, _PREVIOUS, *_option_parts(options, frozenset())]
    return Item(
        product=product,
        position=position,
        choices=choices,
        options=options,
        clickables=clickables,
        actions=actions_of(clickables),
        tail=tail,
        head_text=quoted(head),
        tail_text=quoted(tail),
    )


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
        label = first = value if plain else f"{name}: {value}"
        number = 2
        while label in labels:  # a value can read as another's name and value
            label, number = f"{first} ({number})", number + 1
        labels[label] = (name, value)
    return labels


def actions_of(clickables: Iterable[str]) -> tuple[str, ...]:
    """The action of each label, as an agent writes it."""
    return tuple([f"click[{label}]" for label in clickables])


def results_head(page: int, total: int, more: bool) -> list[Part]:
    """The top of a page of results; page counts from 1, total is the number of hits on all pages."""
    counted = Part("text", f"Page {page} (Total results: {total})")
    return [_BACK, counted, *([_PREVIOUS] if page > 1 else []), *([_NEXT] if more else [])]


def results_parts(head: Sequence[Part], cards: Sequence[Card], opened: frozenset[str] | set[str]) -> list[Part]:
    """opened: the products that this visit has looked at."""
    parts = list(head)
    for each in cards:
        parts.append(Part("product", each.asin, each.asin in opened))
        parts += each.parts
    return parts


def results_text(head: Sequence[Part], cards: Sequence[Card]) -> str:
    """A page of results in text mode."""
    return SEPARATOR.join([quoted(head), *[each.text for each in cards]])


def item_parts(page: Item, clicked: frozenset[tuple[str, str]] | set[tuple[str, str]], selection: str) -> list[Part]:
    """clicked: the (name, value) pairs that are marked as selected. selection: a line that says so, or nothing."""
    said = [Part("text", selection)] if selection else []
    return [_BACK, _PREVIOUS, *_option_parts(page.options, clicked), *said, *page.tail]


def item_text(page: Item, selection: str) -> str:
    """The page of a product in text mode."""
    said = (f"'{selection}'",) if selection else ()
    return SEPARATOR.join((page.head_text, *said, page.tail_text))


def _option_parts(
    options: Iterable[tuple[str, Iterable[tuple[str, str]]]], clicked: frozenset[tuple[str, str]] | set[tuple[str, str]]
) -> list[Part]:
    parts: list[Part] = []
    for name, values in options:
        parts += _texts(name)
        for value, label in values:
            parts += [Part("option", part.text, (name, value) in clicked) for part in _texts(label)]
    return parts


def selection_text(product: Product, chosen: Mapping[str, str]) -> str:
    """What is selected, in the order of the product's options; empty if nothing is."""
    selected = ", ".join(f"{name} {chosen[name]}" for name in product.options if name in chosen)
    return f"Selected: {selected}" if selected else ""


def sub_page_parts(product: Product, name: str) -> list[Part]:
    """The description, the features or the reviews (of which the catalogue holds none)."""
    texts: Sequence[str] = ()
    if name == "description":
        texts = [product.description]
    elif name == "features":
        texts = [f" {bullet}" for bullet in product.bullets]  # the original's page indents them, so none is dropped
    return [_BACK, _PREVIOUS, *(part for text in texts for part in _texts(text))]


def done_parts(asin: str, chosen: Mapping[str, str], score: float) -> list[Part]:
    """The page after a purchase, which no agent acts on."""
    options = json.dumps(chosen, sort_keys=True)
    for character in "<>&'":  # as Flask writes JSON into a page
        options = options.replace(character, f"\\u{ord(character):04x}")
    texts = (
        *("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"),
        *("Purchased", "asin", asin, "options", options, "attrs", "None"),
        *("category", "None", "query", "None", "product category", "None"),
        # "instuction" is the original's spelling.
        *("Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"),
        *("query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(score), "Reward Details ", "None"),
    )
    return [Part("text", text) for text in texts]


def heading(task: str, with_name: bool) -> list[Part]:
    """What the original shows above every page but the last. with_name: on the page with the search box."""
    head = [Part("text", "WebShop"), Part("text", "Instruction: ")] if with_name else [Part("text", "Instruction:")]
    return [*head, *_texts(task)]


def plain(parts: Iterable[Part]) -> str:
    """Text mode as the original's environment writes it."""
    return SEPARATOR.join([part.text.strip() for part in parts])


def quoted(parts: Iterable[Part]) -> str:
    """Text mode as verl-agent shows it to the agent: each text in single quotes."""
    return SEPARATOR.join([f"'{part.text.strip()}'" for part in parts])


def segments_of(page: str) -> list[str]:
    """The texts that `quoted` put together; a page of another form (text_rich, a grid) is one text."""
    return [_unquoted(segment) for segment in page.split(SEPARATOR)]


def _unquoted(segment: str) -> str:
    return segment[1:-1] if len(segment) > 1 and segment[0] == segment[-1] == "'" else segment


def rich(parts: Iterable[Part]) -> str:
    """text_rich: a line each; what has been clicked is marked, and selected options are said first."""
    said, lines = "", []
    for part in parts:
        if part.kind == "text":
            lines.append(part.text)
            continue
        button = "clicked button" if part.clicked else "button"
        before = {"button": "", "option": "  ", "product": "\n"}[part.kind]
        lines.append(f"{before}[{button}] {part.text} [{button}_]")
        if part.kind == "option" and part.clicked:
            said = f"You have clicked {part.text}.\n{said}"
    return said + "".join([f"{line}\n" for line in lines])
