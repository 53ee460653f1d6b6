"""Every transport of the CPU between real processes: it moves what the plan says, to the bit, or fails in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megagent.errors import InfrastructureError
from megagent.parallel.degrees import Degrees
from megagent.parallel.reshard import checksum, hold
from megagent.parallel.reshard.spec import Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import tiny
from tests.parallel.pool import free_ports
from tests.parallel.reshard.processes import Processes, sources, targets

FAMILY = "qwen3_moe"


def terms(target_dtype: str = "F32", engines: int = 1) -> SyncSpec:
    """TP 2 x PP 2 ranks with experts apart; two workers."""
    degrees, workers = Degrees(tp=2, pp=2, ep=2, etp=1), Workers(tp=2 // engines, engines=engines)
    node = Device("here")
    return SyncSpec(
        degrees,
        workers,
        "F32",
        target_dtype,
        sources=(node,) * degrees.world,
        targets=(node,) * 2,
        timeout_s=100.0,
        buffer_bytes=512,
    )


def started(transport: str, spec: SyncSpec) -> Processes:
    rendezvous = ["127.0.0.1", free_ports(1)[0]] if transport == "gloo" else None
    return Processes(spec, FAMILY, transport, rendezvous)


def expected(plan: SyncPlan, change: float) -> dict[int, dict[str, Any]]:
    """The golden way."""
    held = {rank: sources(plan, FAMILY, rank, change) for rank in plan.plan.source.tensors}
    written = {rank: targets(plan, rank) for rank in plan.plan.target.tensors}
    hold.execute(plan.plan, held, written)
    return {rank: {name: tensor.float().numpy() for name, tensor in named.items()} for rank, named in written.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "dtype", "engines"), [("shared_memory", "F32", 1), ("gloo", "F32", 1), ("gloo", "BF16", 2)]
)
def test_every_version_arrives_as_the_plan_says_and_each_byte_once(transport: str, dtype: str, engines: int) -> None:
    spec = terms(dtype, engines)
    plan = make_sync_plan(spec, tiny(FAMILY))
    assert len(plan.rounds) > 4, "several rounds are under way"
    with started(transport, spec) as processes:
        for version, change in enumerate((0.0, 0.5), start=3):
            processes.call(processes.ranks, "withdraw")
            processes.call(processes.ranks, "change", change)
            received = processes.sync(version)
            for rank, (_, _, tensors) in enumerate(received):
                for name, array in expected(plan, change)[rank].items():
                    np.testing.assert_array_equal(tensors[name], array, err_msg=f"{name} on worker {rank}")
            assert sum(moved for moved, _, _ in received) == sum(plan.plan.traffic.values())
            assert sum(processes.sent) == (0 if transport == "shared_memory" else sum(plan.plan.traffic.values()))
            sent = checksum.merge(processes.call(processes.ranks, "checksums"))
            assert checksum.differences(sent, checksum.merge(sums for _, sums, _ in received)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "harm"), [("worker 1", "kill"), ("rank 0", "kill"), ("worker 1", "pause")])
def test_a_peer_that_is_killed_or_silent_fails_the_sync_on_both_sides(victim: str, harm: str) -> None:
    with started("gloo", terms()) as processes:
        processes.sync(1)
        alive = [name for name in (*processes.ranks, *processes.workers) if name != victim]
        if harm == "pause":
            processes.call(alive, "set_timeout", 3.0)  # only now: nothing but the failure depends on it
        getattr(processes, harm)(victim)
        processes.call([name for name in alive if name in processes.ranks], "offer", 2)
        offers = {rank: {"version": 2} for rank in range(4)}
        for name in alive:
            processes.ask([name], *(("send", 2) if name in processes.ranks else ("receive", offers, 2)))
        failed = {name for name in alive if _fails(processes, name, "weight sync over gloo")}
        # The others may have had all that they wanted of each other by then.
        assert failed >= {"rank 0", "worker 0", "worker 1"} - {victim}


def _fails(processes: Processes, name: str, words: str) -> bool:
    try:
        processes.answers([name])
    except InfrastructureError as error:
        return words in str(error)
    return False


@pytest.mark.slow
def test_peers_of_another_version_or_another_plan_are_refused_before_the_first_byte() -> None:
    with started("gloo", terms()) as processes:
        processes.call(processes.ranks, "offer", 7)
        processes.ask(processes.ranks, "send", 7)
        processes.ask(processes.workers, "receive", {rank: {"version": 8} for rank in range(4)}, 8)
        with pytest.raises(InfrastructureError, match="worker 0: .*rank 0 is at version 7, this one at 8"):
            processes.answers(processes.workers)
        with pytest.raises(InfrastructureError, match="rank 0: .*worker 0 is at version 8, this one at 7"):
            processes.answers(processes.ranks)
        with pytest.raises(InfrastructureError, match="version 8, this one at 7"):  # and it stays of no use
            processes.call(["rank 0"], "send", 7)


@pytest.mark.slow
def test_weights_that_change_while_they_are_read_or_before_are_noticed() -> None:
    with started("shared_memory", terms()) as processes:
        offers = dict(enumerate(processes.call(processes.ranks, "offer", 1)))
        processes.call(processes.workers, "open", offers, 1)
        processes.call(["rank 1"], "withdraw")
        with pytest.raises(InfrastructureError, match=r"ranks \[1\] changed version 1 of their weights while"):
            processes.call(processes.workers, "read")
        with pytest.raises(InfrastructureError, match=r"ranks \[1\] changed version 1 of their weights before"):
            processes.call(processes.workers, "open", offers, 1)
        with pytest.raises(InfrastructureError, match="version 2 is not possible: rank 0 offers 1; rank 1 offers 1"):
            processes.call(processes.workers, "open", offers, 2)
        processes.sync(2)


@pytest.mark.slow
def test_memory_of_a_process_that_has_ended_cannot_be_opened() -> None:
    with started("shared_memory", terms()) as processes:
        offers = dict(enumerate(processes.call(processes.ranks, "offer", 1)))
        processes.call(["worker 0"], "receive", offers, 1)
        processes.kill("rank 0")
        with pytest.raises(InfrastructureError, match=r"/proc/\d+/fd/\d+ of the trainer cannot be opened"):
            processes.call(["worker 1"], "open", offers, 1)
        # What has been opened before stays readable: it is of the version that it says.
        processes.call(["worker 0"], "receive", offers, 1)
