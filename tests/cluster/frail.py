"""An environment that dies, hangs or raises when it is told to. Importing this module enters it in the registry."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megagent.config import EnvConfig
from megagent.envs import WORLDS
from megagent.envs.base import Observation, Split, StepResult, Task, WorldEntry, draw_tasks

TASK = Task(uid="frail-1", split="train", key="last three steps")


@dataclass
class FrailConfig(EnvConfig):
    name: str = "frail"
    scratch: str = ""  # a folder: which of the "... once" actions were taken


class Frail:
    """Ends after three steps. `die`, `hang` and `raise` do so each time, `die once` the first time it is taken."""

    digest = "frail"

    def __init__(self, config: FrailConfig) -> None:
        self.scratch = Path(config.scratch)
        self.taken = 0

    def tasks(self, split: Split) -> Sequence[Task]:
        return [TASK]

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]:
        return draw_tasks([TASK], count, seed, iteration)

    def make(self) -> Frail:
        return Frail(FrailConfig(scratch=str(self.scratch)))

    def reset(self, task: Task) -> Observation:
        self.taken = 0
        return self._observe()

    def step(self, action: str) -> StepResult:
        if action == "die" or (action == "die once" and self._first(action)):
            os._exit(1)
        if action == "hang":
            time.sleep(3600)
        if action == "raise":
            raise ValueError("broken")
        self.taken += 1
        done = self.taken == 3
        return StepResult(self._observe(), reward=float(done), done=done, won=done, score=float(done))

    def _first(self, action: str) -> bool:
        try:
            (self.scratch / action).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _observe(self) -> Observation:
        return Observation("last", f"step {self.taken} in {os.getpid()}", ("go", "die once"))


WORLDS["frail"] = WorldEntry(FrailConfig, Frail)
