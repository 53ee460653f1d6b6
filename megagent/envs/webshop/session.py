"""One visit to the shop: which page is open, what is selected, and what an action changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megagent.envs.webshop import pages
from megagent.envs.webshop.catalog import Product
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.reward import Reward, purchase_reward
from megagent.envs.webshop.rules import Rules
from megagent.envs.webshop.search import SearchIndex

# Greedy and not anchored at the end, as in the original: "search[x] now" searches, "I will search[x]" does not.
_ACTION = re.compile(r"(.+)\[(.+)\]")


@dataclass(frozen=True)
class Shop:
    """What all visits share."""

    products: Sequence[Product]
    index: SearchIndex
    prices: Mapping[str, float]  # asin -> dollars
    page_size: int
    most_results: int
    rules: Rules


class Session:
    """A visit with a goal. Pages: search, results, item, description, features, reviews, done."""

    def __init__(self, shop: Shop, goal: Goal) -> None:
        self.shop = shop
        self.goal = goal
        self.reward: Reward | None = None
        self._home()

    def _home(self) -> None:
        self.page = "search"
        self.hits: Sequence[int] = ()  # positions of the products found
        self.results_page = 1
        self.item: Product | None = None
        self.chosen: dict[str, str] = {}  # option name -> value
        self._offer()

    @property
    def done(self) -> bool:
        return self.page == "done"

    @property
    def has_search_box(self) -> bool:
        return self.page == "search"

    @property
    def clickables(self) -> tuple[str, ...]:
        """What can be clicked on this page, lower case, in page order."""
        return tuple(self._clicks)

    def segments(self) -> list[str]:
        """The texts of the page after the task, in order."""
        if self.page == "search":
            return pages.search_segments()
        if self.page == "results":
            return pages.results_segments(self.shown(), self.results_page, len(self.hits))
        assert self.item is not None
        if self.page == "item":
            return pages.item_segments(self.item, self.chosen, self.shop.rules)
        return pages.sub_page_segments(self.item, self.page)

    def anchor(self) -> str:
        """The page as the agent sees it: the state of the visit, without task and history."""
        if self.done:
            assert self.item is not None
            assert self.reward is not None
            return pages.done_text(self.item, self.chosen, self.reward.score)
        return pages.anchor(self.segments())

    def shown(self) -> list[Product]:
        """The products on the open page of results."""
        begin = (self.results_page - 1) * self.shop.page_size
        return [self.shop.products[position] for position in self.hits[begin : begin + self.shop.page_size]]

    def act(self, action: str) -> None:
        """Carries out an action; anything that is neither a search nor a button of this page changes nothing.

        A search is accepted on every page before the purchase, as in the original.
        """
        match = _ACTION.match(action)
        if self.done or match is None:
            return
        verb, argument = match.group(1), match.group(2).lower()
        if verb == "search":
            self._search(argument)
        elif verb == "click" and argument in self._clicks:
            self._clicks[argument]()
        self._offer()

    def _offer(self) -> None:
        """Lists what each button of the page does, in page order. Buttons of the shop win over options of that name."""
        clicks: dict[str, Callable[[], None]] = {}
        if self.page == "search":
            clicks["search"] = lambda: None
        elif not self.done:
            clicks[pages.BACK.lower()] = self._home
        if self.page == "results":
            if self.results_page > 1:
                clicks[pages.PREVIOUS.lower()] = partial(self._turn, -1)
            clicks[pages.NEXT.lower()] = partial(self._turn, 1)
            for product in self.shown():
                clicks[product.asin.lower()] = partial(self._open, product)
        elif self.page == "item":
            assert self.item is not None
            clicks[pages.PREVIOUS.lower()] = self._results
            for name in pages.SUB_PAGES:
                clicks[name.lower()] = partial(self._show, name.lower())
            clicks[pages.BUY.lower()] = self._buy
            for label, (name, value) in pages.option_labels(self.item, self.shop.rules).items():
                clicks.setdefault(label, partial(self._select, name, value))
        elif not self.done and self.page != "search":
            clicks[pages.PREVIOUS.lower()] = partial(self._show, "item")
        self._clicks = clicks

    def _search(self, query: str) -> None:
        self.hits = self.shop.index.search(query, self.shop.most_results)
        self.results_page = 1
        self._results()

    def _results(self) -> None:
        self.page, self.item, self.chosen = "results", None, {}

    def _turn(self, step: int) -> None:
        self.results_page += step
        self._results()

    def _open(self, product: Product) -> None:
        self.page, self.item = "item", product

    def _show(self, page: str) -> None:
        self.page = page

    def _select(self, name: str, value: str) -> None:
        self.chosen[name] = value

    def _buy(self) -> None:
        assert self.item is not None
        price = self.shop.prices[self.item.asin]
        self.reward = purchase_reward(self.goal, self.item, price, self.chosen, self.shop.rules)
        self.page = "done"
