"""Goals by number, and panels of tasks over them. Everything is decoded when it is asked for: millions cost nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megagent.envs.base import Split, Task, draw_tasks
from megagent.envs.webshop import goals
from megagent.envs.webshop.deal import Prices, as_bound
from megagent.envs.webshop.goals import Goal, Options
from megagent.envs.webshop.lazy import LazySequence
from megagent.envs.webshop.panels import Place
from megagent.envs.webshop.product import Product
from megagent.errors import MegagentError

if TYPE_CHECKING:
    from megagent.envs.webshop.catalog import Catalog


WITNESSES = 16  # tasks of a panel whose order and wording a digest covers


class GoalBook(Protocol):
    """All goals of one kind over a catalogue: those of each product are numbered from 0."""

    @property
    def counts(self) -> NDArray[np.integer]:
        """[products] goals of each product."""
        ...

    def goal(self, position: int, number: int) -> Goal:
        """A goal of the product at a position of the catalogue."""
        ...

    def key(self, goal: Goal) -> str:
        """Names the goal among all of the book."""
        ...

    def find(self, key: str) -> Goal | None:
        """The goal of a key; None if the book has no such goal."""
        ...


class SyntheticGoals:
    """Each product with an instruction, under every choice of its options."""

    def __init__(self, catalog: Catalog, wording: Callable[[Product, Options], Goal] | None = None) -> None:
        """wording: makes a goal of product and options, with a price bound; without it, as the original does."""
        self._catalog = catalog
        self._wording = wording
        self._bounds = catalog.arrays["goals/synthetic_bound"]
        self.counts: NDArray[np.integer] = catalog.arrays["goals/synthetic"]

    def goal(self, position: int, number: int) -> Goal:
        product = self._catalog[position]
        return self.worded(product, goals.choice(goals.distinct_values(product.options), number), position)

    def worded(self, product: Product, options: Options, position: int) -> Goal:
        """The goal to buy the `product` at a position with `options`."""
        if self._wording:
            return self._wording(product, options)
        return goals.synthetic_goal(product, options, as_bound(int(self._bounds[position])))

    def key(self, goal: Goal) -> str:
        return goals.goal_key(goal.product.asin, goal.options)

    def find(self, key: str) -> Goal | None:
        asin, *asked = parse_key(key)
        position = self._catalog.position(asin)
        if position is None or not self.counts[position]:
            return None
        product = self._catalog[position]
        options = asked_options(product, asked)
        return None if options is None else self.worded(product, options, position)


class HumanGoals:
    """What people wrote, as far as the product that they wrote it for can meet it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._bounds = catalog.arrays["goals/human_bound"]
        self._ends = np.cumsum(catalog.arrays["goals/human_all"], dtype=np.int64)
        self.counts: NDArray[np.integer] = catalog.arrays["goals/human"]

    def goal(self, position: int, number: int) -> Goal:
        product = self._catalog[position]
        winnable = list(goals.winnable_instructions(product).items())
        goals.check_number(number, len(winnable))
        return self._worded(product, position, *winnable[number])

    def _worded(self, product: Product, position: int, number: int, options: Options) -> Goal:
        instructions = goals.human_instructions(product)
        bound = self._bounds[int(self._ends[position]) - len(instructions) + number]
        return goals.human_goal(product, instructions[number], options, as_bound(int(bound)))

    def key(self, goal: Goal) -> str:
        return goals.goal_key(goal.product.asin, goal.words)

    def find(self, key: str) -> Goal | None:
        asin, *asked = parse_key(key)
        position = self._catalog.position(asin)
        if position is None or len(asked) != 1:
            return None
        product = self._catalog[position]
        instructions = goals.human_instructions(product)
        for number, options in goals.winnable_instructions(product).items():
            if instructions[number].text == asked[0]:
                return self._worded(product, position, number, options)
        return None


class PanelTasks(LazySequence[Task]):
    """The tasks of one panel."""

    def __init__(self, book: GoalBook, split: str, places: Sequence[Place]) -> None:
        self._book = book
        self._split = split
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, index: int) -> Task:
        key = self._book.key(self._book.goal(*self._places[index]))
        return Task(uid_of(key), self._split, key)


def requests_of(book: SyntheticGoals) -> dict[str, list[Place]]:
    """The goals of a small book by what they ask for and in which words, price bound aside."""
    requests: dict[str, list[Place]] = {}
    for position, count in enumerate(book.counts.tolist()):
        for number in range(count):
            goal = book.goal(position, number)
            requests.setdefault(f"{goal.product.instruction} {goal.options}", []).append((position, number))
    return requests


def uid_of(key: str) -> str:
    """The uid of a task: the same in every process and every run."""
    return f"webshop-{goals.hash_of(key)[:16]}"


def parse_key(key: str) -> list[Any]:
    """The parts of a `goals.goal_key`, the asin first; without any, an asin that no product has."""
    try:
        parts = json.loads(key)
    except ValueError:
        return [""]
    return parts if isinstance(parts, list) and parts and isinstance(parts[0], str) else [""]


def asked_options(product: Product, asked: Sequence[Any]) -> Options | None:
    """The options of a key, if each is a value of the product and none is missing; otherwise None."""
    names = sorted(product.options)
    if len(asked) != len(names):
        return None
    for name, pair in zip(names, asked, strict=True):
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] != name or pair[1] not in product.options[name]:
            return None
    return tuple((name, value) for name, value in asked)


class Panels:
    """The honest panels over one book: disjoint, fixed, the same for everybody."""

    def __init__(self, book: GoalBook, places: Mapping[str, Sequence[Place]], prices: Prices) -> None:
        self._book = book
        self._panels = {split: PanelTasks(book, split, panel) for split, panel in places.items()}
        self._prices = prices

    def __len__(self) -> int:
        return sum(map(len, self._panels.values()))

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._panels[split]

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]:
        return draw_tasks(self.tasks(split), count, seed, iteration)

    def find(self, task: Task) -> Goal | None:
        """What a task asks for; None if there is no such goal."""
        return self._book.find(task.key) if task.uid == uid_of(task.key) else None

    def facts(self) -> object:
        """What a digest should cover: how many tasks each panel has, which come first and how they are worded."""
        facts = {}
        for split, tasks in self._panels.items():
            first = [(task.uid, self._book.find(task.key)) for task in tasks[:WITNESSES]]
            facts[split] = [len(tasks), [[uid, goal.text if goal else ""] for uid, goal in first]]
        return facts

    def random_goal(self, task: Task, rng: random.Random) -> Goal:
        raise MegagentError("a goal at random is drawn only under env.compat=verl_agent")

    def prices(self, seed: int) -> Prices:
        return self._prices
