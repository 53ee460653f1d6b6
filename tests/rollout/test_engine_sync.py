"""Syncs from shard to shard into real engines: both placements, and what dies in the middle of one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest

pytest.importorskip("vllm")

from megagent.cluster.ranks import free_port
from megagent.errors import InfrastructureError, MegagentError
from megagent.parallel.reshard import checksum
from megagent.rollout.engine import Generation, Sampling, VllmEngine
from tests.rollout.test_engine import (
    GREEDY,
    PROMPT,
    START_TIMEOUT_S,
    assert_same_policy,
    gone,
    make_config,
    make_model,
)
from tests.rollout.trainers import SECONDS, Trainers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
T = TypeVar("T")


class Pair:
    """An engine, its event loop, and the ranks that it gets its weights from."""

    def __init__(self, folder: Path, tp: int, tied: bool, placement: str, transport: str) -> None:
        self.folder, self.tied = folder, tied
        self.model = make_model(folder / "model", tied, seed=1)
        config = make_config(tp)
        config.rollout.sync, config.rollout.placement = transport, placement
        rendezvous = ["127.0.0.1", free_port("127.0.0.1")] if transport == "gloo" else None
        self.trainers = Trainers(folder / "model", tp, transport, rendezvous)
        self.loop = asyncio.new_event_loop()
        self.engine = VllmEngine(config, folder / "model", timeout_s=START_TIMEOUT_S)
        self.run(self.engine.start())
        self.run(self.engine.open_sync(self.trainers.terms))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def generate(self) -> Generation:
        return self.run(self.engine.generate(PROMPT, GREEDY))

    def learn(self, seed: int) -> int:
        """New random weights on the ranks, and in `model`; their version."""
        self.model = make_model(self.folder / "next", self.tied, seed)
        self.trainers.call("load", str(self.folder / "next"))
        return (self.engine.version or 0) + 1

    async def move(self, version: int, checksums: bool = False) -> list[dict[str, Any]]:
        update = self.trainers.update(version, checksums)
        self.trainers.ask("send", version)
        return await self.engine.receive(update)

    async def sync(self, version: int, checksums: bool = False) -> list[dict[str, Any]]:
        await self.engine.prepare(version)
        reports = await self.move(version, checksums)
        await self.engine.serve()
        assert all(isinstance(sent, int) for sent in self.trainers.answers())
        return reports

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.close()
        self.trainers.close()


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("colocated"), 1, tied=True, placement="colocated", transport="shared_memory")
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("apart"), 2, tied=False, placement="disaggregated", transport="gloo")
    yield pair
    pair.close()


def test_an_engine_that_does_not_agree_with_the_trainer_is_unusable(tmp_path: Path) -> None:
    """One worker's error leaves vLLM's calls to all of them out of step."""

    async def refuse(_: Any) -> None:
        raise RuntimeError("engine 0 plans the weight sync otherwise than the trainer")

    async def ask_twice() -> None:
        make_model(tmp_path, tied=True, seed=1)
        engine: Any = VllmEngine(make_config(), tmp_path)
        engine._llm = SimpleNamespace(init_weight_transfer_engine=refuse, output_handler=None, errored=False)
        with pytest.raises(InfrastructureError, match="agreeing on the weight sync failed: engine 0 plans"):
            await engine.open_sync({})
        with pytest.raises(InfrastructureError, match="unusable"):
            await engine.prepare(1)

    asyncio.run(ask_twice())


def test_an_engine_that_slept_serves_the_new_weights(colocated: Pair) -> None:
    version = colocated.learn(seed=2)
    colocated.run(colocated.engine.sleep())
    [report] = colocated.run(colocated.sync(version))
    assert report["version"] == colocated.engine.version == version
    generation = colocated.generate()
    assert generation.version == version
    assert_same_policy(colocated.model, PROMPT, generation)


def test_checksums_of_both_sides_are_equal(colocated: Pair) -> None:
    reports = colocated.run(colocated.sync(colocated.learn(seed=3), checksums=True))
    received = {worker: report["checksums"] for worker, report in enumerate(reports)}
    assert all(received.values())
    assert checksum.differences(checksum.merge(colocated.trainers.call("checksums")), received) == []


def test_a_sleeping_engine_takes_neither_requests_nor_weights(colocated: Pair) -> None:
    version = colocated.learn(seed=4)
    colocated.run(colocated.engine.sleep())
    with pytest.raises(MegagentError, match="sleeps and has no weights"):
        colocated.generate()
    with pytest.raises(MegagentError, match="engine is asleep, and syncing begins when it is awake without weights"):
        colocated.run(colocated.engine.receive(colocated.trainers.update(version)))
    with pytest.raises(MegagentError, match="engine is asleep, and going back to serving begins"):
        colocated.run(colocated.engine.serve())
    colocated.run(colocated.sync(version))
    assert_same_policy(colocated.model, PROMPT, colocated.generate())


def test_a_stale_version_is_refused_and_the_engine_goes_on(colocated: Pair) -> None:
    with pytest.raises(MegagentError, match="not newer"):
        colocated.run(colocated.engine.prepare(colocated.engine.version or 0))
    assert_same_policy(colocated.model, PROMPT, colocated.generate())


def test_weights_that_change_while_they_are_read_end_the_engine(colocated: Pair) -> None:
    """Comes last of this engine: nobody can say which version it holds."""
    version = colocated.learn(seed=5)
    update = colocated.trainers.update(version)
    colocated.trainers.call("load", str(colocated.folder / "next"))  # withdraws what was offered
    colocated.run(colocated.engine.prepare(version))
    with pytest.raises(InfrastructureError, match="unusable"):
        colocated.run(colocated.engine.receive(update))
    with pytest.raises(InfrastructureError, match=f"the update to weights version {version} failed"):
        colocated.generate()


def test_a_draining_engine_completes_its_responses_and_answers_later_ones_anew(apart: Pair) -> None:
    old, version = apart.model, apart.learn(seed=6)

    async def race() -> list[Generation]:
        before = [asyncio.create_task(apart.engine.generate(PROMPT, GREEDY)) for _ in range(8)]
        await asyncio.sleep(0)
        update = asyncio.create_task(apart.sync(version))
        await asyncio.sleep(0.01)
        after = [asyncio.create_task(apart.engine.generate(PROMPT, GREEDY)) for _ in range(8)]
        await update
        return await asyncio.gather(*before, *after)

    generations = apart.run(race())
    assert generations[-1].version == version
    for generation in generations:
        assert_same_policy(apart.model if generation.version == version else old, PROMPT, generation)


def test_a_sender_that_dies_in_the_middle_ends_the_engine(apart: Pair) -> None:
    version = apart.learn(seed=7)
    children = [psutil.Process(pid) for pid in apart.engine.processes]
    apart.trainers.call("fail_after", 5, "die")
    apart.run(apart.engine.prepare(version))

    async def with_a_request_waiting() -> tuple[Any, Any]:
        waiting = asyncio.create_task(apart.engine.generate(PROMPT, Sampling(max_tokens=4)))
        await asyncio.sleep(0)
        return await asyncio.gather(apart.move(version), waiting, return_exceptions=True)

    moved, answered = apart.run(with_a_request_waiting())
    assert isinstance(moved, InfrastructureError)
    assert isinstance(answered, InfrastructureError)
    with pytest.raises(InfrastructureError, match=f"the update to weights version {version} failed"):
        apart.generate()
    assert gone(children, within_s=SECONDS)
    other, dead = apart.trainers.answers()
    assert dead is None
    assert other.startswith("raised: weight sync over gloo")


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[tuple[Pair, int]]:
    """A pair and the version of its next sync, in the middle of which rank 1 waits to be told to go on."""
    pair = Pair(tmp_path, 1, tied=False, placement="disaggregated", transport="gloo")
    try:
        version = pair.learn(seed=8)
        pair.trainers.call("fail_after", 5, "wait")
        pair.run(pair.engine.prepare(version))
        yield pair, version
    finally:
        pair.close()


def test_a_sender_that_hangs_in_the_middle_ends_the_engine_at_its_deadline(stuck: tuple[Pair, int]) -> None:
    pair, version = stuck
    pair.engine._timeout_s = 10.0
    with pytest.raises(InfrastructureError, match="unusable: .* took longer than 10 s"):
        pair.run(pair.move(version))
    with pytest.raises(InfrastructureError, match="unusable"):
        pair.generate()
    assert pair.trainers.answer(1) == "waiting"
    pair.trainers.tell(1, "go on")
    assert all(str(answer).startswith("raised: weight sync over gloo") for answer in pair.trainers.answers())


def test_a_receiver_that_dies_in_the_middle_fails_the_senders(stuck: tuple[Pair, int]) -> None:
    pair, version = stuck

    async def kill_in_the_middle() -> Any:
        # The ranks' offers are read before anybody else listens to them.
        update = pair.trainers.update(version)
        pair.trainers.ask("send", version)
        moving = asyncio.create_task(pair.engine.receive(update))
        assert await asyncio.to_thread(pair.trainers.answer, 1) == "waiting"
        os.kill(pair.engine.processes[0], signal.SIGKILL)
        pair.trainers.tell(1, "go on")
        return await asyncio.gather(moving, return_exceptions=True)

    [moved] = pair.run(kill_in_the_middle())
    assert isinstance(moved, InfrastructureError)
    with pytest.raises(InfrastructureError, match="unusable"):
        pair.generate()
    assert all(str(answer).startswith("raised: weight sync over gloo") for answer in pair.trainers.answers())
