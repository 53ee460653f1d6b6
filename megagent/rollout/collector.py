"""The agent loop: every episode is a coroutine that talks to its environment and to the engine in turn.

Episodes do not wait for each other, so a slow answer or a long response holds up its own episode only.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megagent.config import Config
from megagent.envs.base import Observation, StepResult, Task
from megagent.errors import EpisodeLost, InfrastructureError
from megagent.rollout.engine import Generation, Sampling
from megagent.rollout.episode import Episode, Step
from megagent.rollout.memory import History
from megagent.rollout.projection import project
from megagent.rollout.prompts import PromptBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engines(Protocol):
    async def generate(self, slot: int, prompt_ids: list[int], sampling: Sampling) -> Generation: ...


class Environments(Protocol):
    async def reset(self, slot: int, task: Task) -> Observation: ...

    async def step(self, slot: int, action: str) -> StepResult: ...


class _Part(NamedTuple):
    """An episode to be played."""

    task: Task
    traj_uid: str
    temperature: float


class Collector:
    """Plays episodes with the policy that the engines hold."""

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, engines: Engines, environments: Environments
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.engines = engines
        self.environments = environments
        self.prompts = PromptBuilder(config.env, config.rollout, tokenizer)

    def collect(
        self,
        tasks: Sequence[Task],
        episodes_per_task: int,
        temperature: float,
        seed: int,
        progress: Callable[[int], None] = lambda episodes: None,
        with_greedy: bool = False,
    ) -> list[Episode]:
        """Play `episodes_per_task` episodes of every task, those of a task after each other in the result.

        seed: decides every sampled token, given the weights. progress: called with 1 as each of these episodes ends.
        with_greedy: play one more episode of every task at temperature 0, at the same time; it is no part of the
        result but of the task's episodes (Episode.greedy).
        An episode whose environment process is lost is played again, env.retries times at most (Episode.lost counts).
        Raises what an environment or engine raised first; the other episodes are dropped then, not scored.
        """
        played: Counter[str] = Counter()  # a small panel may give a task twice: its episodes are numbered on
        plan: list[_Part] = []
        for task in tasks:
            for _ in range(episodes_per_task):
                plan.append(_Part(task, f"{task.uid}/{seed}/{played[task.uid]}", temperature))
                played[task.uid] += 1
        sampled = len(plan)
        if with_greedy:
            plan += [_Part(task, f"{uid}/{seed}/greedy", 0.0) for uid, task in {t.uid: t for t in tasks}.items()]
        episodes = asyncio.run(self._collect(plan, sampled, progress))
        greedy = {episode.task.uid: episode for episode in episodes[sampled:]}
        for episode in episodes[:sampled]:
            episode.greedy = greedy.get(episode.task.uid)
        return episodes[:sampled]

    async def _collect(self, plan: list[_Part], counted: int, progress: Callable[[int], None]) -> list[Episode]:
        """The episodes of the plan; the first `counted` of them are progress."""
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._play(slot, part)) for slot, part in enumerate(plan)]
                for episode in running[:counted]:
                    episode.add_done_callback(lambda _: progress(1))
        except BaseExceptionGroup as failures:
            # Many episodes tend to fail of one cause (an engine that died); the first says which.
            raise failures.exceptions[0] from None
        return [episode.result() for episode in running]

    async def _play(self, slot: int, part: _Part) -> Episode:
        """One episode; again from its start, with the same draws, if the process that hosts it is lost."""
        retries = self.config.env.retries
        for lost in range(retries + 1):
            try:
                return await self._attempt(slot, Episode(part.task, part.traj_uid, lost=lost), part.temperature)
            except EpisodeLost as error:
                reason = error
        raise InfrastructureError(
            f"task {part.task.uid}: its episode was lost {retries + 1} times and env.retries={retries}; the last time: "
            f"{reason} The iteration ends here; look at the memory of the node and at the Ray logs of that process."
        ) from reason

    async def _attempt(self, slot: int, episode: Episode, temperature: float) -> Episode:
        observation = await self.environments.reset(slot, episode.task)
        episode.instruction = observation.task
        history = History(self.config.env.history_length)
        for index in range(self.config.env.max_steps):
            prompt_ids = self.prompts.build(observation, history)
            sampling = Sampling(
                temperature=temperature,
                max_tokens=self.config.rollout.max_response_tokens,
                seed=zlib.crc32(f"{episode.traj_uid}/{index}".encode()),
            )
            generation = await self.engines.generate(slot, prompt_ids, sampling)
            text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            projection = project(text, observation.admissible, self.config.env.reply_rules)
            result = await self.environments.step(slot, projection.action)
            episode.steps.append(
                Step(
                    page=observation.page,
                    prompt_ids=prompt_ids,
                    response_ids=generation.token_ids,
                    log_probs=generation.log_probs,
                    text=text,
                    action=projection.action,
                    parsed=projection.parsed,
                    admissible=projection.admissible,
                    valid=projection.valid,
                    reward=result.reward,
                    version=generation.version,
                )
            )
            history.add(observation.page, projection.action)
            observation = result.observation
            if result.done:
                episode.won, episode.score, episode.finished = result.won, result.score, True
                break
        return episode
