"""Ray actors that host the environments: many in each process over one shared world, a batch of them a call.

An episode is a coroutine of the driver and asks for one reset or step at a time. What the episodes of one worker ask
for while it is busy goes to it in one call, so thousands of environments cost few messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megagent.cluster.calls import answer, wait_all
from megagent.config import EnvConfig
from megagent.envs.base import Environment, Observation, StepResult, Task, build_world
from megagent.errors import EpisodeLost, InfrastructureError

KEY = "env.step_timeout_s"
MOST_REQUESTS = 256  # of one call, so that the first of thousands of episodes need not wait for the last
# Workers of a node where env.workers=0. One of them plays thousands of WebShop steps a second; more are only memory.
MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer of an environment that raised."""

    sentence: str


@ray.remote(num_cpus=0)
class EnvironmentActor:
    """One world (catalogue, index, goals) and the environments of the slots that it was given."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.environments: dict[int, Environment] = {}
        self.tasks: dict[int, Task] = {}

    def start(self) -> None:
        self.world = build_world(self.config)

    def play(
        self, resets: Sequence[tuple[int, Task]], steps: Sequence[tuple[int, str]]
    ) -> tuple[list[Observation | Failure], list[StepResult | Failure]]:
        """A batch of either kind: (slot, task) and (slot, action), answered in their order."""
        return self.reset_many(resets), self.step_many(steps)

    def reset_many(self, resets: Sequence[tuple[int, Task]]) -> list[Observation | Failure]:
        """Begins an episode of the task in each slot, which keeps its environment for the next ones."""
        return [self._reset(slot, task) for slot, task in resets]

    def step_many(self, steps: Sequence[tuple[int, str]]) -> list[StepResult | Failure]:
        """Takes the action in each slot."""
        return [self._step(slot, action) for slot, action in steps]

    def _reset(self, slot: int, task: Task) -> Observation | Failure:
        self.tasks[slot] = task
        try:
            if slot not in self.environments:
                self.environments[slot] = self.world.make()
            return self.environments[slot].reset(task)
        except Exception as error:
            return self._failure(slot, "reset", error)

    def _step(self, slot: int, action: str) -> StepResult | Failure:
        try:
            return self.environments[slot].step(action)
        except Exception as error:
            return self._failure(slot, f"step with action {str(action)[:200]!r}", error)

    def _failure(self, slot: int, doing: str, error: Exception) -> Failure:
        raised = f"{type(error).__name__}: {error}"
        return Failure(
            f"env.name={self.config.name}: {doing} of task {self.tasks[slot].uid} raised {raised}. "
            "An environment must answer every action; the iteration ends here and its rows are not used."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One reset or step, and who waits for its answer."""

    slot: int
    what: Task | str  # the task of a reset, the action of a step
    waiter: asyncio.Future[Any]

    def settle(self, result: Any) -> None:
        """Hand over the answer, or raise it if it is an exception. A waiter that has gone away is left alone."""
        if self.waiter.done():
            return
        if isinstance(result, Failure):
            result = InfrastructureError(result.sentence)
        if isinstance(result, BaseException):
            self.waiter.set_exception(result)
        else:
            self.waiter.set_result(result)


class Worker:
    """One actor and what is asked of it. An actor that dies or goes silent is replaced; its episodes are lost."""

    def __init__(self, config: EnvConfig, name: str, make: Callable[[], ActorHandle]) -> None:
        self.config = config
        self.name = name
        self.actor = make()
        self._make = make
        self._lives = 0  # actors before this one
        self._born: dict[int, int] = {}  # slot -> life in which its episode began
        self._waiting: list[Request] = []
        self._server: asyncio.Task[None] | None = None

    async def ask(self, slot: int, what: Task | str) -> Any:
        """The answer to a reset or step. Raises EpisodeLost if the actor of this episode is no more."""
        loop = asyncio.get_running_loop()
        request = Request(slot, what, loop.create_future())
        self._waiting.append(request)
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        return await request.waiter

    async def _serve(self) -> None:
        """Answers all requests, those that came during one call in the next."""
        batch: list[Request] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST_REQUESTS], self._waiting[MOST_REQUESTS:]
                await self._play(batch)
                await asyncio.sleep(0)  # whoever can go on at once joins the next call
        except Exception as error:
            batch += self._waiting
            for request in batch:
                request.settle(error)
        finally:
            self._waiting = []

    async def _play(self, batch: Sequence[Request]) -> None:
        resets = [request for request in batch if isinstance(request.what, Task)]
        steps = []
        for request in batch:
            if isinstance(request.what, Task):
                self._born[request.slot] = self._lives
            elif self._born[request.slot] == self._lives:
                steps.append(request)
            else:
                request.settle(EpisodeLost(f"{self.name} was started again"))
        if not resets and not steps:
            return
        try:
            call = self.actor.play.remote([(r.slot, r.what) for r in resets], [(s.slot, s.what) for s in steps])
            observed, stepped = await answer(call, self.name, "play", self.config.step_timeout_s, KEY)
        except InfrastructureError as error:
            if not _is_lost(error):
                raise
            await self._restart()
            for request in (*resets, *steps):
                request.settle(EpisodeLost(str(error)))
            return
        for request, result in zip((*resets, *steps), (*observed, *stepped), strict=True):
            request.settle(result)

    async def _restart(self) -> None:
        """Another actor in place of this one, ready to play. Raises InfrastructureError if it does not start."""
        with contextlib.suppress(RayError):
            ray.kill(self.actor, no_restart=True)
        self.actor = self._make()
        self._lives += 1
        start, timeout_s = self.actor.start.remote(), self.config.start_timeout_s
        await answer(start, self.name, "another start", timeout_s, "env.start_timeout_s")


def _is_lost(error: InfrastructureError) -> bool:
    """Whether the process failed and not the code in it: it died, its node did, or it missed its deadline."""
    cause = error.__cause__
    return isinstance(cause, TimeoutError) or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError))


class EnvironmentGroup:
    """The workers of a run; an episode's slot decides which of them plays it.

    Raises CatalogError if the world cannot be built, InfrastructureError if a worker does not start.
    """

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.workers = [
            Worker(config, f"environment worker {index}", _maker(config, options))
            for index, options in enumerate(placements(config.workers))
        ]
        starts = {worker.name: worker.actor.start.remote() for worker in self.workers}
        wait_all(starts, "start of the environments", config.start_timeout_s)

    async def reset(self, slot: int, task: Task) -> Observation:
        """Begin an episode of `task` in a slot.

        Raises EpisodeLost if its process died or missed its deadline, InfrastructureError if the environment raised.
        """
        return await self._worker(slot).ask(slot, task)

    async def step(self, slot: int, action: str) -> StepResult:
        """Take an action in the episode of a slot. Raises as `reset` does."""
        return await self._worker(slot).ask(slot, action)

    def _worker(self, slot: int) -> Worker:
        return self.workers[slot % len(self.workers)]

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            ray.kill(worker.actor, no_restart=True)


def _maker(config: EnvConfig, options: dict[str, Any]) -> Callable[[], ActorHandle]:
    return lambda: EnvironmentActor.options(**options).remote(config)


def placements(workers: int) -> list[dict[str, Any]]:
    """Ray options of each worker: `workers` of them, or for 0 as many as each node's cores suggest."""
    if workers:
        return [{"scheduling_strategy": "SPREAD"}] * workers
    options = []
    for node in ray.nodes():
        cores = int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
        # soft: where the node is gone, another one takes the worker that replaces the lost one.
        place = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)}
        options += [place] * (workers_of(cores) if cores else 0)
    return options or [{"scheduling_strategy": "SPREAD"}]


def workers_of(cores: int) -> int:
    """Workers of a node: one a core, but one core for the driver and whatever else runs there."""
    return max(1, min(cores - 1, MOST_WORKERS))
