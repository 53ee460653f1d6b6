"""What an environment is to the rest of megagent: tasks, observations, steps, and a registry of worlds.

A new environment is one module that offers a `World` and one entry in `WORLDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, Protocol

import numpy as np

from megagent.config import EnvConfig
from megagent.errors import ConfigError

Split = Literal["warmup", "train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("warmup", "train", "validation", "test")
HELD_OUT: tuple[Split, ...] = ("validation", "test")  # never trained on


@dataclass(frozen=True, slots=True)
class Task:
    """Names one task of a world; light enough to be sent anywhere."""

    uid: str  # the same in every process and every run
    split: str  # the panel it belongs to
    key: str  # what it asks for, readable


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees now."""

    task: str  # what is asked for, in words
    page: str  # the current state without task and history: the anchor of step groups
    admissible: tuple[str, ...]  # every action that is accepted here; search[<your query>] stands for any query


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to."""

    observation: Observation
    reward: float  # what training sees: env.success_reward of a won episode, otherwise 0
    done: bool
    won: bool
    score: float  # the world's own score of a finished episode, 0 to 1; 0 before its end


class Environment(Protocol):
    """One episode at a time. It never starts over by itself: after `done` only `reset` is allowed."""

    def reset(self, task: Task) -> Observation:
        """Starts an episode of `task`. Raises MegagentError if the world does not know the task."""
        ...

    def step(self, action: str) -> StepResult:
        """Takes one action, any text. One that is not admissible leaves the state as it is.

        Raises MegagentError before the first reset and after the end of an episode.
        """
        ...


class World(Protocol):
    """What all environments of a process share and nobody changes: catalogue, index, tasks."""

    @property
    def digest(self) -> str:
        """A hash of all panels with their tasks' wording: equal digests mean equal tasks in equal panels."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of one panel, always in the same order. No task is in two panels."""
        ...

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]:
        """The `count` tasks that iteration 1, 2, ... plays, the same for the same seed. Usually `draw_tasks`.

        Of a held-out panel, iteration is the number of the validation, from 1.
        """
        ...

    def make(self) -> Environment:
        """A new environment over this world."""
        ...


@dataclass(frozen=True, slots=True)
class WorldEntry:
    """One environment of the registry."""

    config: type[EnvConfig]  # its keys of `env`: the common ones and its own
    build: Callable[[Any], World]  # from an instance of `config`


WORLDS: dict[str, WorldEntry] = {}


def build_world(config: EnvConfig) -> World:
    """The world that `env.name` names. Raises ConfigError for an unknown name, CatalogError for bad data."""
    if config.name not in WORLDS:
        known = ", ".join(sorted(WORLDS))
        close = get_close_matches(config.name, WORLDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of: {known}"
        raise ConfigError([f"env.name={config.name}: no such environment ({hint})"])
    entry = WORLDS[config.name]
    if not isinstance(config, entry.config):
        problem = f"a {entry.config.__name__} is wanted, and this is a {type(config).__name__}"
        raise ConfigError([f"env.name={config.name}: {problem}; megagent.config_load makes the right one"])
    return entry.build(config)


def draw_tasks(tasks: Sequence[Task], count: int, seed: int, iteration: int) -> list[Task]:
    """`count` tasks of iteration 1, 2, ...: passes over `tasks` in a new order each, cut into iterations.

    A task comes again only after all others have come, and twice in one iteration only if there are fewer than `count`.
    Stateless: what an iteration plays follows from the seed, so a resumed run continues. A held-out panel is not passed
    over: every validation plays its first `count` tasks, so that their figures can be compared.
    """
    if tasks[0].split in HELD_OUT:
        return [tasks[index] for index in range(min(count, len(tasks)))]
    first = (iteration - 1) * count
    chosen: list[Task] = []
    while len(chosen) < count:
        epoch, offset = divmod(first + len(chosen), len(tasks))
        order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
        chosen += [tasks[index] for index in order[offset : offset + count - len(chosen)]]
    return chosen
