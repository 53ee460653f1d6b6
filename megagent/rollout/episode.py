"""What a rollout yields: episodes of steps, and the step batch made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megagent.batch import Jagged, StepBatch, objects
from megagent.envs.base import Task


@dataclass
class Step:
    """One prompt, one response, and what the environment made of it."""

    page: str  # the state without history: the anchor of step groups
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]  # of the response tokens, as the sampler saw them
    text: str
    action: str
    parsed: bool  # the reply has the form that was asked for
    admissible: bool  # the page offered the action
    valid: bool  # what the penalty goes by: both, unless env.compat has it otherwise
    reward: float = 0.0
    version: int | None = None  # of the weights that the response was sampled with


@dataclass
class Episode:
    """One attempt at a task. `finished` is False if it ran into env.max_steps."""

    task: Task
    traj_uid: str
    steps: list[Step] = field(default_factory=list)
    instruction: str = ""  # the task in words
    won: bool = False
    score: float = 0.0  # the environment's own score, 0 to 1
    finished: bool = False
    lost: int = 0  # times that it was begun and lost with its process before this one
    greedy: Episode | None = None  # one of the same task at temperature 0, that it is measured against

    @property
    def reward(self) -> float:
        return sum(step.reward for step in self.steps)


def step_rows(episodes: Sequence[Episode]) -> StepBatch:
    """One row for each step that was played, episodes after each other and steps in order of time.

    Where greedy episodes were played beside them, baseline_rewards is the reward of the task's.
    """
    rows = [(episode, index, step) for episode in episodes for index, step in enumerate(episode.steps)]
    responses = Jagged.from_list([torch.tensor(step.response_ids, dtype=torch.int64) for _, _, step in rows])
    batch = StepBatch(
        {
            "uid": objects([episode.task.uid for episode, _, _ in rows]),
            "traj_uid": objects([episode.traj_uid for episode, _, _ in rows]),
            "anchor_obs": objects([step.page for _, _, step in rows]),
            "step_index": torch.tensor([index for _, index, _ in rows], dtype=torch.int64),
            "rewards": torch.tensor([step.reward for _, _, step in rows], dtype=torch.float32),
            "episode_rewards": torch.tensor([episode.reward for episode, _, _ in rows], dtype=torch.float32),
            "is_action_valid": torch.tensor([step.valid for _, _, step in rows], dtype=torch.bool),
            "is_padding": torch.zeros(len(rows), dtype=torch.bool),
            "prompts": Jagged.from_list([torch.tensor(step.prompt_ids, dtype=torch.int64) for _, _, step in rows]),
            "responses": responses,
            "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.float32)),
            "rollout_log_probs": responses.like(
                torch.tensor([value for _, _, step in rows for value in step.log_probs], dtype=torch.float32)
            ),
        }
    )
    baselines = [episode.greedy.reward for episode, _, _ in rows if episode.greedy is not None]
    return batch.with_columns(baseline_rewards=torch.tensor(baselines, dtype=torch.float32)) if baselines else batch
