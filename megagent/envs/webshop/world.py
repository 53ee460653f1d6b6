"""WebShop as an environment: the world that all visits of a process share."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Protocol

from megagent.envs.base import SPLITS, Split, Task
from megagent.envs.webshop import embedded
from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.config import EMBEDDED, WebShopConfig
from megagent.envs.webshop.deal import Prices
from megagent.envs.webshop.environment import WebShopEnvironment
from megagent.envs.webshop.goals import Goal, hash_of
from megagent.envs.webshop.original import OriginalPanels, SeededGoals
from megagent.envs.webshop.panels import split_by_product, split_by_request
from megagent.envs.webshop.rules import Rules, rules_of
from megagent.envs.webshop.search import SearchIndex
from megagent.envs.webshop.session import Shop
from megagent.envs.webshop.tasks import HumanGoals, Panels, SyntheticGoals, requests_of
from megagent.errors import CatalogError, MegagentError

_CACHED_GOALS = 1024


class TaskSource(Protocol):
    """Who decides what is asked for: the honest panels, or verl-agent's lists."""

    def __len__(self) -> int:
        """Goals of all panels together; one that two panels share counts once."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]: ...

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]: ...

    def find(self, task: Task) -> Goal | None:
        """What a task asks for; None if there is no such goal."""
        ...

    def facts(self) -> object:
        """What the digest of the world covers, fit for JSON."""
        ...

    def random_goal(self, task: Task, rng: random.Random) -> Goal:
        """The goal of a visit that begins behind the back of the one with `task`."""
        ...

    def prices(self, seed: int) -> Prices:
        """What each product costs someone whose goal has this price_seed."""
        ...


class WebShopWorld:
    """Catalogue, index and goals of one shop. Not changed after it is built, so any number of visits share it.

    Goals are decoded when they are asked for, so that a world over millions opens at once.
    """

    def __init__(self, config: WebShopConfig, catalog: Catalog) -> None:
        """Raises CatalogError if the catalogue holds no goals of the kind that env.goals names."""
        self.catalog = catalog
        self.success_reward = config.success_reward
        rules = rules_of(config.compat)
        self._source = _task_source(config, catalog, rules)
        self._named = f"env.catalog={config.catalog}"
        self.goal = lru_cache(_CACHED_GOALS)(self._goal)
        most = config.max_results
        if config.catalog == EMBEDDED:
            most = min(most, embedded.RESULT_PAGES * config.page_size)
        self.shop = Shop(
            catalog,
            SearchIndex(catalog.arrays),
            self._source.prices,
            config.page_size,
            most,
            rules,
            rich=config.observation == "text_rich",
        )
        if not len(self._source):
            human = "; items_human_ins.json belongs to them" if config.goals == "human" else ""
            raise CatalogError(
                f"{self._named}: no goals can be made of its products for env.goals={config.goals}{human}"
            )
        self.digest = self._digest(config)

    def _digest(self, config: WebShopConfig) -> str:
        """A hash of what decides the tasks and their rewards: the products, the rules and facts of the task source.

        It costs the same for any number of tasks.
        """
        facts = {
            "products": self.catalog.digest,
            "compat": config.compat,
            "goals": config.goals,
            "rules": asdict(self.shop.rules),
            "tasks": self._source.facts(),
        }
        return hash_of(json.dumps(facts, sort_keys=True))

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of one panel. Raises CatalogError if it is empty, MegagentError if there is no such panel.

        Under env.compat=verl_agent these are the list of the first worker of a run with seed 0; the other workers have
        lists of their own, see `draw`.
        """
        if split not in SPLITS:
            raise MegagentError(f"no panel {split!r}; use one of {', '.join(SPLITS)}")
        tasks = self._source.tasks(split)
        if not tasks:
            raise CatalogError(
                f"{self._named}: no goal falls in the {split} panel, and all panels hold {len(self._source)} goals "
                "together; use a larger catalogue"
            )
        return tasks

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]:
        """The tasks of iteration 1, 2, ...; under env.compat=verl_agent, those of that reset of its workers.

        Raises as `tasks`, and CatalogError if verl-agent could not draw so many.
        """
        self.tasks(split)
        return self._source.draw(split, count, seed, iteration)

    def _goal(self, task: Task) -> Goal:
        """What a task asks for. Raises MegagentError if it is not of this world."""
        goal = self._source.find(task)
        if goal is None:
            raise MegagentError(
                f"task {task.uid} ({task.key}) is not one of {self._named}; use the env.catalog, env.goals and "
                "env.compat that it was drawn with"
            )
        return goal

    def random_goal(self, task: Task, rng: random.Random) -> Goal:
        """The goal of the visit that begins by itself after a purchase, where the rules have that."""
        return self._source.random_goal(task, rng)

    def goal_list(self, seed: int) -> SeededGoals:
        """The goals of verl-agent's worker with a seed, in its order. Raises MegagentError under env.compat=none."""
        if not isinstance(self._source, OriginalPanels):
            raise MegagentError("only env.compat=verl_agent has goal lists by seed; use tasks(split)")
        return self._source.goals.of_seed(seed)

    def make(self) -> WebShopEnvironment:
        return WebShopEnvironment(self)


def build_webshop(config: WebShopConfig) -> WebShopWorld:
    """The shop that `env.catalog` names: `embedded`, a folder in the original's schema, or a file built from one.

    Raises CatalogError if there is none, with all faults of a folder's files, or if no goals can be made of it.
    """
    return WebShopWorld(config, Catalog.load(config.catalog))


def _task_source(config: WebShopConfig, catalog: Catalog, rules: Rules) -> TaskSource:
    human = config.goals == "human"
    if not rules.split_by_product:
        return OriginalPanels(catalog, human, rules)
    prices = Prices(catalog.arrays)
    if config.catalog == EMBEDDED and not human:
        book = SyntheticGoals(catalog, embedded.goal)
        return Panels(book, split_by_request(requests_of(book), embedded.HELD_OUT), prices)
    goals = HumanGoals(catalog) if human else SyntheticGoals(catalog)
    return Panels(goals, split_by_product(catalog.arrays["goals/panel"], goals.counts), prices)
