"""Ray actors that host the environments, many in each process over one shared world."""

from __future__ import annotations

import ray
from ray.actor import ActorHandle

from megagent.cluster.calls import answer, wait_all
from megagent.config import EnvConfig
from megagent.envs.base import Environment, Observation, StepResult, Task, build_world
from megagent.errors import InfrastructureError

KEY = "env.step_timeout_s"


@ray.remote(num_cpus=0)
class EnvironmentActor:
    """One world (catalogue, index, goals) and the environments of the slots that it was given."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.environments: dict[int, Environment] = {}
        self.tasks: dict[int, Task] = {}

    def start(self) -> None:
        self.world = build_world(self.config)

    def reset(self, slot: int, task: Task) -> Observation:
        if slot not in self.environments:
            self.environments[slot] = self.world.make()
        self.tasks[slot] = task
        try:
            return self.environments[slot].reset(task)
        except Exception as error:
            raise self._failure(slot, "reset", error) from error

    def step(self, slot: int, action: str) -> StepResult:
        try:
            return self.environments[slot].step(action)
        except Exception as error:
            raise self._failure(slot, f"step with action {str(action)[:200]!r}", error) from error

    def _failure(self, slot: int, doing: str, error: Exception) -> InfrastructureError:
        raised = f"{type(error).__name__}: {error}"
        return InfrastructureError(
            f"env.name={self.config.name}: {doing} of task {self.tasks[slot].uid} raised {raised}. "
            "An environment must answer every action; the iteration ends here and its rows are not used."
        )


class EnvironmentGroup:
    """`env.workers` actors; an episode's slot decides which of them plays it."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.actors: list[ActorHandle] = [EnvironmentActor.remote(config) for _ in range(config.workers)]
        calls = {f"environment worker {index}": actor.start.remote() for index, actor in enumerate(self.actors)}
        wait_all(calls, "start of the environments", config.start_timeout_s)

    async def reset(self, slot: int, task: Task) -> Observation:
        actor, name = self._worker(slot)
        return await answer(actor.reset.remote(slot, task), name, "reset", self.config.step_timeout_s, KEY)

    async def step(self, slot: int, action: str) -> StepResult:
        actor, name = self._worker(slot)
        return await answer(actor.step.remote(slot, action), name, "step", self.config.step_timeout_s, KEY)

    def _worker(self, slot: int) -> tuple[ActorHandle, str]:
        index = slot % len(self.actors)
        return self.actors[index], f"environment worker {index}"

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
