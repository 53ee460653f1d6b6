"""Environments that fail, in real actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from megagent.cluster.environments import EnvironmentGroup
from megagent.cluster.session import ray_session
from megagent.config import Config
from megagent.envs.base import build_world
from megagent.envs.webshop.config import WebShopConfig
from megagent.errors import CatalogError, InfrastructureError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(Config()):
        yield


def test_a_worker_plays_an_episode_like_the_world_in_this_process() -> None:
    config = WebShopConfig(workers=1)
    world = build_world(config)
    task = world.tasks("train")[0]
    here = world.make()
    expected = [here.reset(task), here.step("search[shirt]").observation]
    group = EnvironmentGroup(config)

    async def play() -> list[object]:
        return [await group.reset(0, task), (await group.step(0, "search[shirt]")).observation]

    assert asyncio.run(play()) == expected
    group.close()


def test_an_environment_that_raises_is_named_with_task_and_action() -> None:
    group = EnvironmentGroup(WebShopConfig(workers=1))
    task = build_world(WebShopConfig()).tasks("train")[0]

    async def step_after_the_end() -> None:
        await group.reset(0, task)
        await group.step(0, 7)  # type: ignore[arg-type]

    with pytest.raises(
        InfrastructureError, match=rf"env.name=webshop: step with action .* of task .*{task.uid[-4:]}.* raised"
    ):
        asyncio.run(step_after_the_end())
    group.close()


def test_a_missing_catalogue_is_one_sentence(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CatalogError, match="nowhere"):
        EnvironmentGroup(WebShopConfig(workers=1, catalog=str(tmp_path / "nowhere")))
