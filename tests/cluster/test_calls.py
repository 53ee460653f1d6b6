"""Remote calls that fail, hang or die, against a real Ray session of the test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import ray

from megagent.cluster.calls import answer, wait_all
from megagent.cluster.session import ray_session
from megagent.config import Config
from megagent.errors import CatalogError, InfrastructureError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(Config()):
        yield


@ray.remote(num_cpus=0)
class Peer:
    def say(self, word: str) -> str:
        return word

    def sleep(self) -> None:
        time.sleep(600)

    def fail(self) -> None:
        raise ValueError("broken")

    def refuse(self) -> None:
        raise CatalogError("items.json: no such file. Give env.catalog=<folder>.")

    def die(self) -> None:
        os._exit(1)


def test_results_come_by_name_in_the_order_of_the_calls() -> None:
    peers = {"rank 0": Peer.remote(), "rank 1": Peer.remote()}
    calls = {name: peer.say.remote(name) for name, peer in peers.items()}
    assert list(wait_all(calls, "greeting", 120).items()) == [("rank 0", "rank 0"), ("rank 1", "rank 1")]


def test_a_failure_ends_the_wait_though_its_peer_hangs() -> None:
    hanging, failing = Peer.remote(), Peer.remote()
    with pytest.raises(InfrastructureError, match="update: rank 1 raised ValueError: broken"):
        wait_all({"rank 0": hanging.sleep.remote(), "rank 1": failing.fail.remote()}, "update", 120)
    ray.kill(hanging)


def test_a_dead_process_ends_the_wait_though_its_peer_hangs() -> None:
    hanging, dying = Peer.remote(), Peer.remote()
    with pytest.raises(InfrastructureError, match="update: the process of rank 1 died"):
        wait_all({"rank 0": hanging.sleep.remote(), "rank 1": dying.die.remote()}, "update", 120)
    ray.kill(hanging)


def test_a_silent_process_is_named_at_the_deadline() -> None:
    hanging = Peer.remote()
    with pytest.raises(InfrastructureError, match="sync: no answer from engine 0 within 1 s"):
        wait_all({"engine 0": hanging.sleep.remote()}, "sync", 1)
    ray.kill(hanging)


def test_a_users_mistake_arrives_as_it_was_raised() -> None:
    with pytest.raises(CatalogError, match=r"items\.json: no such file"):
        wait_all({"environment worker 0": Peer.remote().refuse.remote()}, "start", 120)


@pytest.mark.parametrize(
    ("method", "timeout_s", "message"),
    [
        ("sleep", 3, "no answer from engine 0"),
        ("fail", 120, "raised ValueError"),
        ("die", 120, "the process of engine 0 died"),
    ],
)
def test_an_awaited_call_fails_in_the_same_words(method: str, timeout_s: float, message: str) -> None:
    import asyncio

    async def call() -> None:
        peer = Peer.remote()
        await answer(getattr(peer, method).remote(), "engine 0", "generation", timeout_s, "cluster.timeout_s")

    with pytest.raises(InfrastructureError, match=message):
        asyncio.run(call())
