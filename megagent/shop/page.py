"""A page of the shop in parts that a terminal and a browser can lay out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megagent.envs.base import Observation
from megagent.envs.webshop import pages
from megagent.envs.webshop.session import Session
from megagent.shop.text import visible

_AS_PRINTED = {text.lower(): text for text in (pages.BACK, pages.PREVIOUS, pages.NEXT, pages.BUY, *pages.SUB_PAGES)}


@dataclass(frozen=True, slots=True)
class Button:
    """Something to click."""

    label: str
    action: str  # what clicking it does, as the agent writes it
    selected: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A product among the results."""

    button: Button
    title: str
    price: str


@dataclass(frozen=True, slots=True)
class OptionRow:
    """An option of a product, and its values."""

    name: str
    buttons: tuple[Button, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """What is on it, besides the task. Texts are fit to be shown; actions are verbatim."""

    kind: str  # search, results, item, description, features, reviews or done
    heading: str
    texts: tuple[str, ...] = ()
    has_search_box: bool = False
    buttons: tuple[Button, ...] = ()  # of the shop itself
    offers: tuple[Offer, ...] = ()
    options: tuple[OptionRow, ...] = ()

    def in_order(self) -> list[Button]:
        """All buttons as they are numbered: the shop's, products, option values."""
        return [
            *self.buttons,
            *(offer.button for offer in self.offers),
            *(button for row in self.options for button in row.buttons),
        ]


def page_of(session: Session, observation: Observation) -> Page:
    """The open page of a visit."""
    if session.done:
        return _done(session)
    clicks = {text[len("click[") : -1]: text for text in observation.admissible if text.startswith("click[")}
    offers, options = _offers(session, clicks), _options(session, clicks)
    shown = {button.action for button in (*(o.button for o in offers), *(b for row in options for b in row.buttons))}
    search = pages.SEARCH_BOX in observation.admissible
    buttons = tuple(
        Button(_AS_PRINTED.get(label, visible(label)), action)
        for label, action in clicks.items()
        # The button beside the search box does nothing by itself: to search is to type.
        if action not in shown and not (search and label == "search")
    )
    heading, texts = _contents(session)
    return Page(session.page, visible(heading), tuple(map(visible, texts)), search, buttons, offers, options)


def _offers(session: Session, clicks: dict[str, str]) -> tuple[Offer, ...]:
    if session.page != "results":
        return ()
    return tuple(
        Offer(
            Button(visible(product.asin), clicks[product.asin.lower()]),
            visible(product.title),
            visible(product.price_tag),
        )
        for product in session.shown()
        if product.asin.lower() in clicks
    )


def _options(session: Session, clicks: dict[str, str]) -> tuple[OptionRow, ...]:
    if session.page != "item" or session.item is None:
        return ()
    rows: dict[str, list[Button]] = {}
    for label, (name, value) in pages.option_labels(session.item, session.shop.rules).items():
        if label in clicks:
            chosen = session.chosen.get(name) == value
            rows.setdefault(name, []).append(Button(visible(label), clicks[label], chosen))
    return tuple(OptionRow(visible(name), tuple(buttons)) for name, buttons in rows.items())


def _contents(session: Session) -> tuple[str, Sequence[str]]:
    """Heading and texts."""
    item = session.item
    if session.page == "results":
        found = len(session.hits)
        return f"Page {session.results_page} ({found} {'product' if found == 1 else 'products'} found)", ()
    if item is None:
        return "Search the shop", ()
    if session.page == "description":
        return f"Description of {item.title}", [item.description or "There is no description."]
    if session.page == "features":
        return f"Features of {item.title}", [text for text in item.bullets if text.strip()] or ["None are listed."]
    if session.page == "reviews":
        return f"Reviews of {item.title}", ["There are no reviews in this catalogue."]
    return item.title, [f"Price: {item.price_tag}"]


def _done(session: Session) -> Page:
    item = session.item
    if item is None:
        return Page("done", "The visit has ended")
    chosen = [f"{name}: {value}" for name, value in session.chosen.items()]
    return Page("done", visible(f"You bought {item.title}"), tuple(map(visible, [f"for {item.price_tag}", *chosen])))
