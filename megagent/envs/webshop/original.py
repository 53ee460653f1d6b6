"""The goals of verl-agent's WebShop: one shuffled list for each worker's seed, and the draws from it.

Everything follows from the seed, by the original's draws in its order: prices, price bounds, the shuffle. Known faults
are kept, as numbers that others report depend on them:
    panels    the first 500 places of a list are held out, and every seed shuffles the list anew, so that a goal held
              out under one seed is trained on under another
    bounds    they differ from seed to seed, for the same product and options
    random    a goal drawn by weight is never the first of the list, and the last one twice as often
"""

from __future__ import annotations

import random
import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megagent.envs.base import HELD_OUT, Split, Task
from megagent.envs.webshop import goals
from megagent.envs.webshop.deal import PRICE_SEED, Prices, as_bound, draw_bounds, draw_prices
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.lazy import LazySequence
from megagent.envs.webshop.panels import place_of
from megagent.envs.webshop.product import HumanInstruction, Product
from megagent.envs.webshop.rules import ORIGINAL, Rules
from megagent.envs.webshop.shuffled import Shuffled
from megagent.envs.webshop.tasks import WITNESSES, asked_options, parse_key
from megagent.errors import CatalogError

if TYPE_CHECKING:
    from megagent.envs.webshop.catalog import Catalog

HELD_OUT_PLACES = 500  # places at the head of every list
HELD_OUT_SEED = 1000  # what the seed of a run is raised by for the workers that validate

_UID = re.compile(r"verl-agent-(\d+)-(\d+)")
_CACHED_BYTES = 1 << 30  # of lists; those of 16 training workers over a million products fit in


class OriginalGoals:
    """The lists of all seeds over one catalogue; the last ones used are kept."""

    def __init__(self, catalog: Catalog, human: bool, rules: Rules = ORIGINAL) -> None:
        self.catalog = catalog
        self.human = human
        self.rules = rules
        synthetic = "goals/synthetic" if rules.goals_once else "goals/synthetic_all"
        counts = catalog.arrays["goals/human_all" if human else synthetic]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._total = int(self._ends[-1]) if len(self._ends) else 0
        self.of_seed = lru_cache(_cached(4 * self._total + 2 * len(counts)))(self._of_seed)
        self.prices = lru_cache(_cached(8 * len(catalog.arrays["goals/range"])))(self._prices)

    def __len__(self) -> int:
        return self._total

    def _prices(self, seed: int) -> Prices:
        """What each product costs a worker with this seed."""
        arrays = self.catalog.arrays
        return Prices(arrays, draw_prices(arrays["goals/range"], self._stream(seed)))

    def _stream(self, seed: int) -> random.Random:
        return random.Random(PRICE_SEED if self.rules.draws_once else seed)

    def _of_seed(self, seed: int) -> SeededGoals:
        """The goal list of a worker with this seed."""
        arrays = self.catalog.arrays
        rng = self._stream(seed)
        prices = np.array(arrays["goals/price"])
        prices[arrays["goals/range_position"]] = draw_prices(arrays["goals/range"], rng)
        if self.human:
            bounds = draw_bounds(np.repeat(prices, arrays["goals/human_all"]), rng)
        else:
            asking = np.flatnonzero(arrays["goals/asks"])
            bounds = np.zeros(len(prices), dtype=np.uint16)
            bounds[asking] = draw_bounds(prices[asking], rng)
        return SeededGoals(self, seed, bounds, Shuffled(self._total, seed))

    def goal(self, place: int, bounds: NDArray[np.uint16], seed: int) -> Goal:
        """A goal by its place in catalogue order. bounds: of `seed`, [products], or [goals] of human ones."""
        position, number = place_of(place, self._ends)
        product = self.catalog[position]
        if self.human:
            instructions = goals.human_instructions(product)
            goals.check_number(number, len(instructions))
            return _human(product, instructions[number], as_bound(int(bounds[place])), seed)
        values = goals.distinct_values(product.options) if self.rules.goals_once else product.options
        options = goals.choice(values, number)
        return goals.synthetic_goal(product, options, as_bound(int(bounds[position])), seed)

    def weights(self, places: NDArray[np.integer]) -> NDArray[np.float64]:
        """The weights of goals by their places in catalogue order."""
        if self.human:
            return np.ones(len(places))
        return self.catalog.arrays["goals/weight"][np.searchsorted(self._ends, places, side="right")]

    def find(self, task: Task) -> Goal | None:
        """What a task asks for, read from its key without any list; None if the catalogue has no such goal."""
        match = _UID.fullmatch(task.uid)
        asin, *asked = parse_key(task.key)
        position = self.catalog.position(asin)
        if match is None or position is None or not asked or not isinstance(asked[-1], float):
            return None
        product, seed = self.catalog[position], int(match[1])
        *asked, bound = asked
        if not self.human:
            options = asked_options(product, asked) if goals.asks(product) else None
            return None if options is None else goals.synthetic_goal(product, options, bound, seed)
        for instruction in goals.human_instructions(product):
            if asked == [instruction.text]:
                return _human(product, instruction, bound, seed)
        return None

    def random_goal(self, seed: int, rng: random.Random) -> Goal:
        """The goal of a visit that begins without a given one."""
        listed = self.of_seed(seed)
        return listed[listed.random_place(rng)]


def _cached(size: int) -> int:
    """How many things of `size` bytes are kept."""
    return min(max(4, _CACHED_BYTES // (size + 1)), 1024)


def _human(product: Product, instruction: HumanInstruction, bound: float, seed: int) -> Goal:
    """A human goal as the original has it: bare values, whatever option they belong to."""
    bare = tuple(("", value) for value in instruction.options)
    return goals.human_goal(product, instruction, bare, bound, seed)


class SeededGoals(LazySequence[Goal]):
    """The goal list of one worker, in its order; goals are decoded when they are asked for."""

    def __init__(self, owner: OriginalGoals, seed: int, bounds: NDArray[np.uint16], places: Shuffled) -> None:
        """places: place in the list -> place in catalogue order."""
        self.seed = seed
        self._owner = owner
        self._bounds = bounds
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, index: int) -> Goal:
        return self._owner.goal(self._places[index], self._bounds, self.seed)

    def weight(self, index: int) -> float:
        """How much a goal weighs in a random draw."""
        return float(self._owner.weights(np.array([self._places[index]]))[0])

    @cached_property
    def _ends(self) -> NDArray[np.float64]:
        """[goals] running sums of the weights, in the order of the list."""
        return np.cumsum(self._owner.weights(self._places.order()))

    def random_place(self, rng: random.Random) -> int:
        """The place of a goal drawn by weight."""
        at = rng.uniform(0, float(self._ends[-1]))
        # The original's running sums begin with a 0, which shifts every place by one.
        shift = 1 if self._owner.rules.random_goal_is_next else 0
        return min(int(np.searchsorted(self._ends, at, side="right")) + shift, len(self) - 1)

    def task(self, index: int, split: str) -> Task:
        """The task of a place in the list."""
        goal = self[index]
        key = goals.goal_key(goal.product.asin, goal.words or goal.options, goal.price_upper)
        return Task(f"verl-agent-{self.seed}-{index}", split, key)


class SeededTasks(LazySequence[Task]):
    """A run of places of one worker's list, as tasks."""

    def __init__(self, owner: OriginalGoals, seed: int, places: range, split: str) -> None:
        self._owner = owner
        self._seed = seed
        self._places = places
        self._split = split

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, index: int) -> Task:
        return self._owner.of_seed(self._seed).task(self._places[index], self._split)


class OriginalPanels:
    """verl-agent's choice of tasks: one place of the list for each group of workers, which each have their own list."""

    def __init__(self, catalog: Catalog, human: bool, rules: Rules = ORIGINAL) -> None:
        self.goals = OriginalGoals(catalog, human, rules)
        self._streams: dict[tuple[Split, int, int], tuple[int, np.random.RandomState]] = {}

    def __len__(self) -> int:
        return len(self.goals)

    def tasks(self, split: Split) -> SeededTasks:
        """The places of a panel in the list of the first worker of a run with seed 0.

        verl-agent has two panels: warm-up is training here, and test is validation.
        """
        return SeededTasks(self.goals, HELD_OUT_SEED if split in HELD_OUT else 0, self._places(split), split)

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]:
        """The tasks of the `iteration`-th reset (from 1) of `count` groups in a run with `seed`; group i has seed + i.

        Raises CatalogError if the panel holds fewer than `count` goals.
        """
        places = self._places(split)
        if count > len(places):
            raise CatalogError(
                f"env.compat=verl_agent: {count} tasks at once cannot be drawn from the {len(places)} of the {split} "
                "panel; draw fewer tasks an iteration, or use a larger catalogue"
            )
        first = seed + HELD_OUT_SEED if split in HELD_OUT else seed
        # One stream for the whole run: an iteration's draw comes after those of all earlier ones.
        done, rng = self._streams.pop((split, count, first), (iteration, np.random.RandomState(first)))
        if done >= iteration:
            done, rng = 0, np.random.RandomState(first)
        for _ in range(done, iteration):
            chosen = rng.choice(len(places), size=count, replace=False)
        self._streams[split, count, first] = (iteration, rng)
        return [
            self.goals.of_seed(first + group).task(places[place], split) for group, place in enumerate(chosen.tolist())
        ]

    def find(self, task: Task) -> Goal | None:
        """What a task asks for; None if there is no such goal."""
        return self.goals.find(task)

    def facts(self) -> object:
        """What a digest should cover: how many goals, and the wording of the first in catalogue order."""
        unbound = np.zeros(max(len(self.goals), len(self.goals.catalog)), dtype=np.uint16)
        first = range(min(WITNESSES, len(self.goals)))
        return [len(self.goals), [self.goals.goal(place, unbound, 0).text for place in first]]

    def random_goal(self, task: Task, rng: random.Random) -> Goal:
        match = _UID.fullmatch(task.uid)
        return self.goals.random_goal(int(match[1]) if match else 0, rng)

    def prices(self, seed: int) -> Prices:
        return self.goals.prices(seed)

    def _places(self, split: Split) -> range:
        """Which places of a list belong to a panel."""
        total = len(self.goals)
        return range(min(HELD_OUT_PLACES, total)) if split in HELD_OUT else range(min(HELD_OUT_PLACES, total), total)
