"""Environments in real actors: in batches, and when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from megagent.cluster.environments import MOST_WORKERS, EnvironmentActor, EnvironmentGroup, workers_of
from megagent.cluster.session import ray_session
from megagent.config import Config, EnvConfig
from megagent.envs.base import Observation, StepResult, build_world
from megagent.envs.webshop.config import WebShopConfig
from megagent.errors import CatalogError, EpisodeLost, InfrastructureError
from megagent.rollout.collector import Collector
from megagent.rollout.engine import Generation, Sampling
from tests.cluster.frail import TASK, FrailConfig
from tests.letters import Letters

pytestmark = pytest.mark.slow

MANY = 4096


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(Config()):
        yield


@pytest.fixture
def groups() -> Iterator[list[EnvironmentGroup]]:
    """Groups that a test opens and that end with it."""
    opened: list[EnvironmentGroup] = []
    yield opened
    for group in opened:
        group.close()


def opened(groups: list[EnvironmentGroup], config: EnvConfig) -> EnvironmentGroup:
    groups.append(EnvironmentGroup(config))
    return groups[-1]


def test_thousands_of_environments_in_one_worker_play_like_one_in_this_process(groups: list[EnvironmentGroup]) -> None:
    config = WebShopConfig(workers=1, step_timeout_s=240)
    world = build_world(config)
    tasks = world.tasks("train")
    here = world.make()
    expected = {}
    for task in tasks:
        observations = [here.reset(task)]
        for action in ("search[shirt]", "click[next >]"):
            observations.append(here.step(action).observation)
        expected[task.uid] = observations
    group = opened(groups, config)

    async def play(slot: int) -> bool:
        task = tasks[slot % len(tasks)]
        observations = [await group.reset(slot, task)]
        for action in ("search[shirt]", "click[next >]"):
            observations.append((await group.step(slot, action)).observation)
        return observations == expected[task.uid]

    async def play_all() -> list[bool]:
        return await asyncio.gather(*map(play, range(MANY)))

    assert all(asyncio.run(play_all()))


def test_a_batch_call_answers_what_single_calls_would() -> None:
    config = WebShopConfig()
    tasks = build_world(config).tasks("train")[:3]
    actor = EnvironmentActor.remote(config)
    ray.get(actor.start.remote(), timeout=240)
    actions = ["search[shirt]", "no action at all", "click[search]"]
    batch = ray.get(actor.reset_many.remote(list(enumerate(tasks))), timeout=120)
    batch += ray.get(actor.step_many.remote(list(enumerate(actions))), timeout=120)
    single = [ray.get(actor.reset_many.remote([(9, task)]), timeout=120)[0] for task in tasks]
    for task, action in zip(tasks, actions, strict=True):
        ray.get(actor.reset_many.remote([(9, task)]), timeout=120)
        single += ray.get(actor.step_many.remote([(9, action)]), timeout=120)
    assert batch == single
    assert all(isinstance(answer, Observation | StepResult) for answer in batch)
    ray.kill(actor)


def test_an_environment_that_raises_is_named_with_task_and_action(groups: list[EnvironmentGroup]) -> None:
    group = opened(groups, FrailConfig(workers=1))

    async def raise_beside_another() -> StepResult:
        await asyncio.gather(group.reset(0, TASK), group.reset(1, TASK))
        other = asyncio.create_task(group.step(1, "go"))
        sentence = r"env.name=frail: step with action 'raise' of task frail-1 raised ValueError: broken\."
        with pytest.raises(InfrastructureError, match=sentence):
            await group.step(0, "raise")
        return await other

    assert not asyncio.run(raise_beside_another()).done  # the others of its batch have their answers


@pytest.mark.parametrize("action", ["die", "hang"])
def test_a_worker_that_dies_or_hangs_is_replaced_and_its_episodes_are_lost(
    action: str, groups: list[EnvironmentGroup]
) -> None:
    group = opened(groups, FrailConfig(workers=1, step_timeout_s=120))

    async def play() -> tuple[str, str]:
        before = (await group.reset(0, TASK)).page
        await group.reset(1, TASK)
        group.config.step_timeout_s = 2 if action == "hang" else 120
        with pytest.raises(EpisodeLost, match="environment worker 0"):
            await group.step(0, action)
        group.config.step_timeout_s = 120
        with pytest.raises(EpisodeLost, match="environment worker 0 was started again"):
            await group.step(1, "go")  # it lived in the same process
        after = (await group.reset(0, TASK)).page
        assert (await group.step(0, "go")).reward == 0
        return before, after

    before, after = asyncio.run(play())
    assert before != after  # another process


class OneReply:
    """An engine that always gives the same action."""

    def __init__(self, action: str) -> None:
        self.ids = Letters().encode(f"<think>on</think><action>{action}</action>")

    async def generate(self, slot: int, prompt_ids: list[int], sampling: Sampling) -> Generation:
        return Generation(token_ids=self.ids, log_probs=[0.0] * len(self.ids), finish_reason="stop", version=1)


def collector(group: EnvironmentGroup, action: str) -> Collector:
    return Collector(Config(env=group.config), Letters(), OneReply(action), group)  # type: ignore[arg-type]


def test_a_rollout_outlives_a_killed_worker_and_scores_no_lost_episode(
    groups: list[EnvironmentGroup], tmp_path: Path
) -> None:
    group = opened(groups, FrailConfig(workers=2, scratch=str(tmp_path)))
    episodes = collector(group, "die once").collect([TASK], episodes_per_task=6, temperature=1.0, seed=0)
    assert [episode.reward for episode in episodes] == [1.0] * 6
    assert [len(episode.steps) for episode in episodes] == [3] * 6
    lost = [episode.lost for episode in episodes]
    assert max(lost) == 1
    assert 0 in (sum(lost[0::2]), sum(lost[1::2]))  # every other episode is of the other worker


def test_a_worker_that_always_dies_ends_the_rollout_with_one_sentence(groups: list[EnvironmentGroup]) -> None:
    group = opened(groups, FrailConfig(workers=1, retries=1))
    with pytest.raises(InfrastructureError, match=r"task frail-1: its episode was lost 2 times and env.retries=1"):
        collector(group, "die").collect([TASK], episodes_per_task=2, temperature=1.0, seed=0)


def test_a_missing_catalogue_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="nowhere"):
        EnvironmentGroup(WebShopConfig(workers=1, catalog=str(tmp_path / "nowhere")))


def test_the_number_of_workers_follows_the_cores(groups: list[EnvironmentGroup]) -> None:
    assert [workers_of(cores) for cores in (1, 2, 8, 224)] == [1, 1, 7, MOST_WORKERS]
    cores = int(ray.cluster_resources()["CPU"])
    assert len(opened(groups, FrailConfig()).workers) == workers_of(cores)
