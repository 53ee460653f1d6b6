"""WebShop as an environment: one shopper's visits, one after the other."""

from __future__ import annotations

import random
from typing import Protocol

from megagent.envs.base import Observation, StepResult, Task
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.session import Session, Shop
from megagent.errors import MegagentError


class Store(Protocol):
    """The part of a WebShop world that a visit needs."""

    @property
    def shop(self) -> Shop: ...

    @property
    def success_reward(self) -> float: ...

    def goal(self, task: Task) -> Goal:
        """What a task asks for. Raises MegagentError if it is not of this world."""
        ...

    def random_goal(self, task: Task, rng: random.Random) -> Goal:
        """The goal of the visit that begins by itself after a purchase, where the rules have that."""
        ...


class WebShopEnvironment:
    """One episode at a time. Under the honest rules it never starts over by itself."""

    def __init__(self, world: Store) -> None:
        self.world = world
        self._task: Task | None = None
        self._session: Session | None = None
        self._asked = ""  # what the first goal of the episode asks for
        self._rng = random.Random()

    @property
    def session(self) -> Session:
        """The visit of the current episode. Raises MegagentError before the first reset."""
        if self._session is None:
            raise MegagentError("the environment has no episode yet; call reset(task) first")
        return self._session

    def reset(self, task: Task) -> Observation:
        goal = self.world.goal(task)
        self._task, self._asked = task, goal.text
        # The original draws from the one stream of its process; this one begins anew with each episode.
        self._rng.seed(task.uid)
        self._session = Session(self.world.shop, goal, self._rng)
        return self._observe(self._session)

    def step(self, action: str) -> StepResult:
        if self.session.done:
            self._restart()
        session = self.session
        session.act(action)
        score = session.reward.score if session.reward else 0.0
        won = score == 1.0
        return StepResult(
            observation=self._observe(session),
            reward=self.world.success_reward if won else 0.0,
            done=session.done,
            won=won,
            score=score,
        )

    def _restart(self) -> None:
        """Begins a visit with a goal drawn at random, where the rules have that; nobody waits for the draw before."""
        if not self.session.shop.rules.restarts_after_purchase:
            raise MegagentError("the episode has ended; call reset(task) to begin the next one")
        assert self._task is not None
        self._session = Session(self.world.shop, self.world.random_goal(self._task, self._rng), self._rng)

    def _observe(self, session: Session) -> Observation:
        # verl-agent finds the page by the task above it; of a visit with another task it shows the whole text.
        is_asked = session.goal.text == self._asked
        page = session.anchor() if is_asked else session.original_text()
        if session.done and session.shop.rules.restarts_after_purchase:
            # The page is still that of the purchase, the actions are those of the visit that follows.
            session = Session(session.shop, session.goal)
        return Observation(self._asked, page, session.admissible())
