"""One visit to the shop: which page is open, what is selected, and what an action changes."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Protocol

from megagent.envs.webshop import pages
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.reward import Reward, purchase_reward
from megagent.envs.webshop.rules import Rules

# Greedy and not anchored at the end, as in the original: "search[x] now" searches, "I will search[x]" does not.
_ACTION = re.compile(r"(.+)\[(.+)\]")
_WHOLE_ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)

_BACK, _PREVIOUS, _NEXT, _BUY, _SEARCH = (
    label.lower() for label in (pages.BACK, pages.PREVIOUS, pages.NEXT, pages.BUY, pages.SEARCH)
)
_SUB_PAGES = frozenset(name.lower() for name in pages.SUB_PAGES)
_SUB_CLICKABLES = (_BACK, _PREVIOUS)

# Ready-made pages that a shop keeps: all of a thousand products, a small part of a million.
_CARDS = 4096
_ITEMS = 1024

_RANDOM_PRODUCTS = 50  # that <r> lists


class Index(Protocol):
    def search(self, query: str, most: int) -> Sequence[int]:
        """Positions of the products that a query finds, best first, at most `most`."""
        ...


class Shop:
    """What all visits share. Nothing in it changes but the cache of ready-made pages."""

    def __init__(
        self,
        products: Sequence[Product],
        index: Index,
        prices: Callable[[int], Sequence[float]],
        page_size: int,
        most_results: int,
        rules: Rules,
        rich: bool = False,
    ) -> None:
        """prices: of all products by position, dollars, for the price_seed of a goal. rich: pages are text_rich."""
        self.products = products
        self.index = index
        self.page_size = page_size
        self.most_results = most_results
        self.rules = rules
        self.rich = rich
        self._prices = prices
        self.card: Callable[[int], pages.Card] = lru_cache(_CARDS)(self._card)
        self.item: Callable[[int], pages.Item] = lru_cache(_ITEMS)(self._item)

    def price(self, position: int, goal: Goal) -> float:
        """What a product costs someone with this goal, in dollars; its page may show a range."""
        return float(self._prices(goal.price_seed)[position])

    @cached_property
    def listed(self) -> Mapping[str, Mapping[str, Sequence[int]]]:
        """What the magic keywords list: positions by category (<c>) and by kind (<q>), in the catalogue's order."""
        lists: dict[str, dict[str, array[int]]] = {"<c>": {}, "<q>": {}}
        for position, product in enumerate(self.products):
            lists["<c>"].setdefault(product.category, array("I")).append(position)
            lists["<q>"].setdefault(product.query, array("I")).append(position)
        return lists

    def _card(self, position: int) -> pages.Card:
        return pages.card(self.products[position], position)

    def _item(self, position: int) -> pages.Item:
        return pages.item(self.products[position], position, self.rules)


class Session:
    """A visit with a goal. Pages: search, results, item, description, features, reviews, done."""

    def __init__(self, shop: Shop, goal: Goal, rng: random.Random | None = None) -> None:
        """rng: of the products that <r> lists, where the rules have it."""
        self.shop = shop
        self.goal = goal
        self.reward: Reward | None = None
        self._rng = rng or random.Random(goal.text)
        self._home()

    def _home(self) -> None:
        self.page = "search"
        self.query = ""
        self.hits: Sequence[int] = ()  # positions of the products found
        self.results_page = 1
        self.opened: set[str] = set()  # asins of the products looked at since the search page
        self.chosen: dict[str, str] = {}  # option name -> value
        self._item: pages.Item | None = None
        self._cards: list[pages.Card] = []
        self._clickables: tuple[str, ...] = () if self.shop.rules.buttons_act else (_SEARCH,)

    @property
    def done(self) -> bool:
        return self.page == "done"

    @property
    def has_search_box(self) -> bool:
        return self.page == "search"

    @property
    def item(self) -> Product | None:
        """The product that is open or bought."""
        return self._item.product if self._item else None

    @property
    def clickables(self) -> tuple[str, ...]:
        """What can be clicked on this page, lower case, in page order."""
        return self._clickables

    def admissible(self) -> tuple[str, ...]:
        """Every action that this page offers; `pages.SEARCH_BOX` stands for any query."""
        if self.page == "item" and self._item is not None:
            return self._item.actions
        clicks = pages.actions_of(self._clickables)
        return (pages.SEARCH_BOX, *clicks) if self.has_search_box else clicks

    def shown(self) -> list[Product]:
        """The products on the open page of results."""
        return [self.shop.products[card.position] for card in self._cards]

    def shown_positions(self) -> list[int]:
        """The same products by their position in the catalogue."""
        return [card.position for card in self._cards]

    def anchor(self) -> str:
        """The page as the agent sees it: the state of the visit, without task and history."""
        if self.shop.rich:
            return pages.rich(self._parts())
        if self.page == "results":
            return pages.results_text(self._results_head(), self._cards)
        if self.page == "item" and self._item is not None:
            return pages.item_text(self._item, self._selection())
        return pages.plain(self._parts()) if self.done else pages.quoted(self._parts())

    def segments(self) -> list[str]:
        """The texts of the page after the task, in order."""
        return [part.text.strip() for part in self._parts()]

    def original_text(self) -> str:
        """The page as the original's environment writes it: the task above it, nothing in quotes."""
        head = [] if self.done else pages.heading(self.goal.text, self.has_search_box)
        if not self.shop.rich:
            return pages.plain([*head, *self._parts()])
        # Selected options are said above everything else, also above the task.
        return pages.rich([*head, *self._parts()])

    def _parts(self) -> list[pages.Part]:
        if self.page == "search":
            return list(pages.SEARCH_PARTS)
        if self.page == "results":
            return pages.results_parts(self._results_head(), self._cards, self.opened)
        assert self._item is not None
        if self.page == "item":
            return pages.item_parts(self._item, self._marked(), "" if self.shop.rich else self._selection())
        if self.done:
            assert self.reward is not None
            return pages.done_parts(self._item.product.asin, self.chosen, self.reward.score)
        return pages.sub_page_parts(self._item.product, self.page)

    def _results_head(self) -> list[pages.Part]:
        return pages.results_head(self.results_page, len(self.hits), self._more())

    def _more(self) -> bool:
        """Whether a next page of results is offered."""
        return not self.shop.rules.pages_end or self.results_page * self.shop.page_size < len(self.hits)

    def _selection(self) -> str:
        assert self._item is not None
        return pages.selection_text(self._item.product, self.chosen) if self.shop.rules.shows_selection else ""

    def _marked(self) -> set[tuple[str, str]]:
        """Which (name, value) pairs text_rich shows as clicked."""
        assert self._item is not None
        if not self.shop.rules.marks_by_address:
            return set(self.chosen.items())
        address = f"{self.query.replace(' ', '+')}/{self.results_page}/{json.dumps(self.chosen)}"
        options = self._item.product.options.items()
        return {(name, value) for name, values in options for value in values if f'"{value}"' in address}

    def act(self, action: str) -> None:
        """Carries out an action; anything that is neither a search nor a button of this page changes nothing."""
        rules = self.shop.rules
        match = _WHOLE_ACTION.fullmatch(action) if rules.whole_actions else _ACTION.match(action)
        if self.done or match is None:
            return
        verb, argument = match.group(1), match.group(2).lower()
        if verb == "search":
            is_query = not rules.whole_actions or (argument.strip() and "\n" not in argument)
            if is_query and (self.has_search_box or not rules.searches_from_box):
                self._search(argument)
        elif verb == "click" and argument != _SEARCH:
            self._click(argument)

    def _click(self, label: str) -> None:
        if label == _BACK and self.page != "search":
            self._home()
        elif self.page == "results":
            self._click_result(label)
        elif self.page == "item":
            self._click_item(label)
        elif label == _PREVIOUS and self.page in _SUB_PAGES:
            assert self._item is not None
            self.page, self._clickables = "item", self._item.clickables

    def _click_result(self, label: str) -> None:
        if label == _PREVIOUS and self.results_page > 1:
            self._results(self.results_page - 1)
        elif label == _NEXT and self._more():
            self._results(self.results_page + 1)
        else:
            for card in self._cards:
                if card.asin.lower() == label:
                    self._item = self.shop.item(card.position)
                    self.opened.add(card.asin)
                    self.page, self._clickables = "item", self._item.clickables
                    return

    def _click_item(self, label: str) -> None:
        """Buttons of the shop win over options of that name."""
        assert self._item is not None
        if label == _PREVIOUS:
            self._results(self.results_page)
        elif label == _BUY:
            self._buy(self._item)
        elif label in _SUB_PAGES:
            self.page, self._clickables = label, _SUB_CLICKABLES
        elif label in self._item.choices:
            name, value = self._item.choices[label]
            self.chosen[name] = value

    def _search(self, query: str) -> None:
        self.query = query
        self._results(1, again=True)

    def _results(self, number: int, again: bool = False) -> None:
        """Opens a page of results; again: of a new search."""
        if again or (self.shop.rules.magic_keywords and self.query.split(" ")[0] == "<r>"):
            self.hits = self._found()  # the original searches again on every page, and finds others at random
        self.page, self.results_page, self.chosen, self._item = "results", number, {}, None
        begin = (number - 1) * self.shop.page_size
        self._cards = [self.shop.card(position) for position in self.hits[begin : begin + self.shop.page_size]]
        previous = (_PREVIOUS,) if number > 1 else ()
        following = (_NEXT,) if self._more() else ()
        self._clickables = (_BACK, *previous, *following, *[card.asin.lower() for card in self._cards])

    def _found(self) -> Sequence[int]:
        products = self.shop.products
        keyword, space, rest = self.query.partition(" ")
        if self.shop.rules.magic_keywords:
            # What makes the original crash (<a>, <c> alone, <r> in a small shop) is an ordinary query here.
            if keyword == "<r>" and len(products) >= _RANDOM_PRODUCTS:
                return self._rng.sample(range(len(products)), _RANDOM_PRODUCTS)
            if keyword == "<c>" and space:
                return self.shop.listed["<c>"].get(rest.split(" ")[0].strip(), ())
            if keyword == "<q>":
                return self.shop.listed["<q>"].get(rest.strip(), ())
        return self.shop.index.search(self.query, self.shop.most_results)

    def _buy(self, item: pages.Item) -> None:
        price = self.shop.price(item.position, self.goal)
        self.reward = purchase_reward(self.goal, item.product, price, self.chosen, self.shop.rules)
        self.page, self._clickables = "done", ()
