"""What a run checks before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megagent.config import RolloutConfig
from megagent.envs.base import Observation, Split, Task
from megagent.envs.sokoban import SokobanConfig
from megagent.errors import MegagentError
from megagent.rollout.prompts import PromptBuilder
from megagent.run import FIRST_PROMPTS, _check_first_prompts
from tests.letters import Letters


class Millions(Sequence[Task]):
    """A panel that makes its tasks when they are asked for, and counts them."""

    made = 0

    def __len__(self) -> int:
        return 6_000_000

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]
        self.made += 1
        return Task(f"t{index}", "train", str(index))


class World:
    """Its wordiest tasks are those at the end of a panel."""

    def __init__(self) -> None:
        self.panels: dict[Split, Millions] = {"train": Millions(), "validation": Millions()}

    def tasks(self, split: Split) -> Millions:
        return self.panels[split]

    def make(self) -> World:
        return self

    def reset(self, task: Task) -> Observation:
        return Observation("x" * (int(task.key) // 10_000), "page", ("go",))


def builder(limit: int) -> PromptBuilder:
    return PromptBuilder(SokobanConfig(), RolloutConfig(max_prompt_tokens=limit), Letters())  # type: ignore[arg-type]


def test_the_first_prompts_of_millions_of_tasks_are_sampled() -> None:
    world = World()
    _check_first_prompts(world, builder(2000))  # type: ignore[arg-type]
    assert all(FIRST_PROMPTS // 2 < panel.made <= FIRST_PROMPTS for panel in world.panels.values())


def test_a_wordy_task_at_the_end_of_a_panel_is_found() -> None:
    with pytest.raises(MegagentError, match="longer than rollout.max_prompt_tokens=600"):
        _check_first_prompts(World(), builder(600))  # type: ignore[arg-type]
