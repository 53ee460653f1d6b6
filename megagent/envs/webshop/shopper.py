"""Scripted shoppers: one that knows the shop by heart and still makes mistakes, for demonstrations, and one that reads
the task and buys the first thing it finds, as a baseline for real products."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megagent.envs.base import Observation, StepResult, Task
from megagent.envs.webshop import pages
from megagent.envs.webshop.environment import WebShopEnvironment
from megagent.envs.webshop.goals import NO_BOUND, Goal
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.reward import purchase_reward
from megagent.envs.webshop.rules import Rules
from megagent.envs.webshop.session import Session
from megagent.envs.webshop.world import WebShopWorld


@dataclass(frozen=True)
class Mistakes:
    """How often a shopper errs, 0 to 1."""

    item: float = 0.65  # opens some product of the page
    option: float = 0.60  # selects another value, for one of the options of an episode
    query: float = 0.10  # searches for another kind of product


PERFECT = Mistakes(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ShopperStep:
    """What the shopper saw, thought and did."""

    observation: Observation
    history: tuple[tuple[str, str], ...]  # (page, action) of every earlier step of the episode
    think: str
    action: str


@dataclass(frozen=True)
class ShopperEpisode:
    task: Task
    steps: tuple[ShopperStep, ...]
    won: bool
    score: float


class Shopper:
    """Shops a task by script. Thoughts restate the part of the task that the step is about, also of a wrong step.

    That is what a tiny model needs to learn from: the words of the task next to the action, mistakes as noise.
    """

    def __init__(self, world: WebShopWorld, mistakes: Mistakes, max_steps: int) -> None:
        self._world = world
        self._mistakes = mistakes
        self._max_steps = max_steps

    def shop(self, task: Task, rng: random.Random) -> ShopperEpisode:
        """One episode of at most max_steps steps; the same rng state gives the same episode."""
        environment = self._world.make()
        observation = environment.reset(task)
        goal = self._world.goal(task)
        errs_at = rng.choice([name for name, _ in goal.options]) if goal.options else ""
        if rng.random() >= self._mistakes.option:
            errs_at = ""
        kind = goal.product.query
        if rng.random() < self._mistakes.query:
            kind = self._other_kind(kind, rng)
        steps: list[ShopperStep] = []
        history: tuple[tuple[str, str], ...] = ()
        while len(steps) < self._max_steps:
            think, action = self._decide(environment.session, goal, kind, errs_at, rng)
            steps.append(ShopperStep(observation, history, think, action))
            if action == f"click[{pages.BACK.lower()}]":
                kind = goal.product.query  # the first search was the wrong one
            history = (*history, (observation.page, action))
            result = environment.step(action)
            observation = result.observation
            if result.done:
                return ShopperEpisode(task, tuple(steps), result.won, result.score)
        return ShopperEpisode(task, tuple(steps), False, 0.0)

    def _decide(self, session: Session, goal: Goal, kind: str, errs_at: str, rng: random.Random) -> tuple[str, str]:
        """Thought and action for the page that is open."""
        if session.page == "search":
            return f"need {_thing(goal, goal.product.query)}", f"search[{_wish(goal, kind)}]"
        if session.page == "results":
            return self._pick(session, goal, rng)
        assert session.item is not None
        labels = pages.option_labels(session.item, session.shop.rules)
        for name, value in goal.options:
            if name in session.chosen or not session.item.options.get(name):
                continue
            offered = {chosen: label for label, (of, chosen) in labels.items() if of == name}
            others = [label for chosen, label in offered.items() if chosen != value]
            errs = name == errs_at or value not in offered
            label = rng.choice(others) if errs and others else offered[value]
            return f"need {name} {value}", f"click[{label}]"
        return "all selected", f"click[{pages.BUY.lower()}]"

    def _pick(self, session: Session, goal: Goal, rng: random.Random) -> tuple[str, str]:
        think = f"need {_thing(goal, goal.product.query)}{_below(goal)}"
        shown = session.shown()
        if shown and rng.random() < self._mistakes.item:
            return think, f"click[{rng.choice(shown).asin.lower()}]"
        for position, product in zip(session.shown_positions(), shown, strict=True):
            if self._satisfies(session, goal, position, product):
                return think, f"click[{product.asin.lower()}]"
        if session.results_page * session.shop.page_size < len(session.hits) and _is_of_kind(shown, goal):
            return think, f"click[{pages.NEXT.lower()}]"
        return think, f"click[{pages.BACK.lower()}]"

    @staticmethod
    def _satisfies(session: Session, goal: Goal, position: int, product: Product) -> bool:
        """Whether buying `product` with the asked options, as far as it has them, would win."""
        chosen = {name: value for name, value in goal.options if value in product.options.get(name, ())}
        price = session.shop.price(position, goal)
        return purchase_reward(goal, product, price, chosen, session.shop.rules).score == 1.0

    def _other_kind(self, kind: str, rng: random.Random) -> str:
        kinds = sorted({product.query for product in self._world.shop.products} - {kind})
        return rng.choice(kinds) if kinds else kind


def demonstrations(
    world: WebShopWorld, tasks: Sequence[Task], episodes: int, mistakes: Mistakes, max_steps: int, seed: int
) -> Iterator[ShopperEpisode]:
    """`episodes` episodes over `tasks`, each task about equally often; the same arguments give the same episodes."""
    rng = random.Random(seed)
    shopper = Shopper(world, mistakes, max_steps)
    order: list[Task] = []
    for _ in range(episodes):
        if not order:
            order = rng.sample(list(tasks), len(tasks))
        yield shopper.shop(order.pop(), rng)


def first_hit(environment: WebShopEnvironment, task: Task) -> StepResult:
    """The end of an episode of a shopper that knows no more than an agent, and hardly thinks.

    It searches for the words of the task, opens the first product, selects what the task names and buys. Where nothing
    is found the episode stays unfinished.
    """
    wish = environment.reset(task).task
    result = environment.step(f"search[{' '.join(wish.split())}]")
    session = environment.session
    for product in session.shown()[:1]:
        environment.step(f"click[{product.asin.lower()}]")
        for label in named_in(wish, product, session.shop.rules):
            environment.step(f"click[{label}]")
        result = environment.step(f"click[{pages.BUY.lower()}]")
    return result


def named_in(wish: str, product: Product, rules: Rules) -> list[str]:
    """The labels of the options that a task's wording names, one for each option: the longest where several fit."""
    words = wish.lower()
    best: dict[str, tuple[int, str]] = {}
    for label, (name, value) in pages.option_labels(product, rules).items():
        if f"{name}: {value}" in words or f"{name} {value}" in words:
            best[name] = max(best.get(name, (-1, "")), (len(value), label))
    return [label for _, label in best.values()]


def _thing(goal: Goal, kind: str) -> str:
    return " ".join((*goal.attributes, kind))


def _wish(goal: Goal, kind: str) -> str:
    return ", ".join((_thing(goal, kind), *(f"{name} {value}" for name, value in goal.options)))


def _below(goal: Goal) -> str:
    return "" if goal.price_upper >= NO_BOUND else f", price below {goal.price_upper:.0f}"


def _is_of_kind(shown: Sequence[Product], goal: Goal) -> bool:
    return any(product.query == goal.product.query for product in shown)
