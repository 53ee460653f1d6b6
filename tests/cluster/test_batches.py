"""How the requests of many episodes become few calls; the actor is a stand-in in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megagent.cluster.environments import MOST_REQUESTS, Failure, Worker
from megagent.config import EnvConfig
from megagent.envs.base import Task
from megagent.errors import InfrastructureError

TASK = Task("t", "train", "t")


class Echo:
    """Answers every request with itself, and takes a few turns of the event loop for it. `remote` as Ray has it."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # how many resets and steps came together

    @property
    def play(self) -> Echo:
        return self

    def remote(self, resets: Sequence[Any], steps: Sequence[Any]) -> asyncio.Future[tuple[list[Any], list[Any]]]:
        return asyncio.ensure_future(self._answer(resets, steps))

    async def _answer(self, resets: Sequence[Any], steps: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        self.calls.append((len(resets), len(steps)))
        for _ in range(3):
            await asyncio.sleep(0)
        broken = Failure("step of task t raised ValueError: broken.")
        return [what for _, what in resets], [broken if what == "raise" else what for _, what in steps]


def worker() -> tuple[Worker, Echo]:
    echo = Echo()
    return Worker(EnvConfig(), "worker", lambda: echo), echo  # type: ignore[arg-type, return-value]


def test_all_episodes_that_are_ready_go_in_as_few_calls_as_fit() -> None:
    hosts, echo = worker()

    async def play() -> list[Any]:
        return await asyncio.gather(*(hosts.ask(slot, TASK) for slot in range(2 * MOST_REQUESTS + 1)))

    assert asyncio.run(play()) == [TASK] * (2 * MOST_REQUESTS + 1)
    assert echo.calls == [(MOST_REQUESTS, 0), (MOST_REQUESTS, 0), (1, 0)]


def test_what_is_asked_during_a_call_waits_for_the_next_one() -> None:
    hosts, echo = worker()

    async def late(slot: int) -> Any:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await hosts.ask(slot, TASK)

    async def play() -> list[Any]:
        first = await asyncio.gather(hosts.ask(0, TASK), *(late(slot) for slot in range(1, 6)))
        return first + await asyncio.gather(*(hosts.ask(slot, f"action {slot}") for slot in range(6)))

    assert asyncio.run(play()) == [TASK] * 6 + [f"action {slot}" for slot in range(6)]
    assert echo.calls == [(1, 0), (5, 0), (0, 6)]


def test_an_environment_that_raises_fails_its_own_episode_only() -> None:
    hosts, _ = worker()

    async def play() -> list[Any]:
        await asyncio.gather(*(hosts.ask(slot, TASK) for slot in range(3)))
        actions = ("go", "raise", "stay")
        return await asyncio.gather(*map(hosts.ask, range(3), actions), return_exceptions=True)

    before, failed, after = asyncio.run(play())
    assert (before, after) == ("go", "stay")
    assert isinstance(failed, InfrastructureError)
    assert str(failed) == "step of task t raised ValueError: broken."


def test_a_rollout_that_was_broken_off_leaves_nothing_for_the_next() -> None:
    hosts, echo = worker()

    async def break_off() -> None:
        asking = [asyncio.ensure_future(hosts.ask(slot, TASK)) for slot in range(4)]
        await asyncio.sleep(0)
        for each in asking:
            each.cancel()
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        asyncio.run(break_off())
    echo.calls.clear()
    assert asyncio.run(hosts.ask(0, TASK)) == TASK
    assert echo.calls == [(1, 0)]
