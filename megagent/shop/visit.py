"""A person's visit: the environment that agents act in, with what was done and how the purchase scored."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import cast

from megagent.envs import build_world
from megagent.envs.base import SPLITS, Split, Task, World
from megagent.envs.webshop.config import EMBEDDED, WebShopConfig
from megagent.envs.webshop.environment import WebShopEnvironment
from megagent.errors import ConfigError, MegagentError
from megagent.rollout.projection import is_admissible
from megagent.shop.explain import Part, explain
from megagent.shop.page import Page, page_of

LONGEST_ACTION = 2000  # characters
REMEMBERED_MOVES = 200  # of a visit; a person may stroll for ever


@dataclass(frozen=True, slots=True)
class ShopOptions:
    """What `megagent shop play` and `serve` were asked for; None leaves the configuration's own value."""

    catalog: str = EMBEDDED
    compat: str | None = None
    goals: str | None = None
    observation: str | None = None
    panel: str = "train"
    task: int | None = None  # place in the panel, from 0, of the first task; None draws it too
    seed: int | None = None  # of the draws; None draws others every time


@dataclass(frozen=True, slots=True)
class Move:
    """One action of a visit."""

    action: str
    admissible: bool  # the page offered it


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a visit."""

    score: float  # 0 to 1
    won: bool
    parts: tuple[Part, ...]  # what the score is made of


class Visit:
    """One visit to the shop with a task. It ends with a purchase."""

    def __init__(self, shop: OpenShop, task: Task, number: int) -> None:
        """number: place of the task in its panel."""
        self.task = task
        self.number = number
        self.max_steps = shop.max_steps
        self.steps = 0
        self.moves: deque[Move] = deque(maxlen=REMEMBERED_MOVES)
        self.outcome: Outcome | None = None
        environment = shop.world.make()
        assert isinstance(environment, WebShopEnvironment)
        self._environment = environment
        self.observation = self._environment.reset(task)
        self.instruction = self.observation.task
        self.page: Page = page_of(self._environment.session, self.observation)

    def act(self, action: str) -> Move:
        """Takes an action as an agent's reply would: in lower case, and without effect where the page has none such.

        Raises MegagentError after the purchase, and for an action that no agent could write.
        """
        if self.outcome is not None:
            raise MegagentError("this visit has ended with a purchase; start a new one")
        if len(action) > LONGEST_ACTION:
            raise MegagentError(f"an action of {len(action)} characters: the longest has {LONGEST_ACTION}")
        action = action.strip().lower()
        move = Move(action, is_admissible(action, self.observation.admissible))
        # The original starts over by itself after a purchase: what was bought is known to the old session only.
        session = self._environment.session
        result = self._environment.step(action)
        self.steps += 1
        self.moves.append(move)
        if result.done:
            assert session.item is not None
            assert session.reward is not None
            parts = explain(session.goal, session.item, session.chosen, session.shop.rules, session.reward)
            self.outcome = Outcome(result.score, result.won, tuple(parts))
        self.observation = result.observation
        self.page = page_of(session, self.observation)
        return move


class OpenShop:
    """A world, and the tasks that visits to it are given."""

    def __init__(self, world: World, options: ShopOptions, max_steps: int) -> None:
        """max_steps: how many an agent has; people may take more.

        Raises MegagentError if the panel is empty or has no such task.
        """
        self.world = world
        self.panel = options.panel
        self.max_steps = max_steps
        self._tasks = world.tasks(cast(Split, options.panel))
        self._first = options.task
        self._rng = random.Random(options.seed)
        if options.task is not None:
            self._check(options.task)

    def __len__(self) -> int:
        """Tasks of the panel."""
        return len(self._tasks)

    def first(self) -> Visit:
        """A visit with the task that was asked for at the start, if any, else with one that is drawn."""
        return self.another() if self._first is None else self.visit(self._first)

    def another(self) -> Visit:
        """A visit with a task that is drawn."""
        return self.visit(self._rng.randrange(len(self._tasks)))

    def visit(self, number: int) -> Visit:
        """A visit with the task at `number` of the panel. Raises MegagentError if there is none."""
        self._check(number)
        return Visit(self, self._tasks[number], number)

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self._tasks):
            raise MegagentError(
                f"task {number}: the {self.panel} panel has tasks 0 to {len(self._tasks) - 1} of this catalogue"
            )


def open_shop(options: ShopOptions) -> OpenShop:
    """Builds the world as training does: from the env group of configs/ (the compact one for the embedded catalogue).

    Raises ConfigError and CatalogError with all faults.
    """
    from megagent.config_load import read

    group = "webshop_compact" if options.catalog == EMBEDDED else "webshop"
    config, faults = read([f"env={group}"])
    faults.report()
    env = config.env
    assert isinstance(env, WebShopConfig)
    chosen = {name: getattr(options, name) for name in ("catalog", "compat", "goals", "observation")}
    env = replace(env, **{name: value for name, value in chosen.items() if value is not None})
    choices = {field.name: field.metadata["choices"] for field in fields(env) if "choices" in field.metadata}
    problems = [
        f"--{name} {chosen[name]}: use one of {', '.join(words)}"
        for name, words in choices.items()
        if chosen.get(name) not in (None, *words)
    ]
    problems += [problem for _, problem in env.problems()]
    if options.panel not in SPLITS:
        problems.append(f"--panel {options.panel}: use one of {', '.join(SPLITS)}")
    if problems:
        raise ConfigError(problems, source="megagent shop")
    return OpenShop(build_world(env), options, env.max_steps)
