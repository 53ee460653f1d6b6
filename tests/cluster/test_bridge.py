"""The driver of a weight sync, on stand-ins for ranks and engines that answer at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megagent.cluster import bridge
from megagent.cluster.bridge import WeightBridge, choose_transport
from megagent.config_check import SYNCS
from megagent.errors import ConfigError, InfrastructureError
from megagent.parallel.degrees import Degrees
from megagent.parallel.reshard import transports
from megagent.parallel.reshard.spec import Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import tiny


def plan_of(sources: str, targets: str, dp: int = 1) -> SyncPlan:
    """One letter for each rank and worker: its node."""
    spec = SyncSpec(
        degrees=Degrees(tp=len(sources) // dp, dp=dp),
        workers=Workers(tp=1, engines=len(targets)),
        source_dtype="F32",
        target_dtype="F32",
        sources=tuple(Device(node) for node in sources),
        targets=tuple(Device(node) for node in targets),
    )
    return make_sync_plan(spec, tiny("qwen2"))


@pytest.mark.parametrize(
    ("platform", "placement", "chosen"),
    [
        ("cpu", "colocated", "shared_memory"),
        ("cpu", "disaggregated", "shared_memory"),
        ("cuda", "colocated", "cuda_ipc"),
        ("cuda", "disaggregated", "nccl"),
    ],
)
def test_weights_are_read_where_they_lie_on_one_node(platform: str, placement: str, chosen: str) -> None:
    assert choose_transport("auto", platform, plan_of("aa", "a"), placement) == chosen


@pytest.mark.parametrize(
    ("platform", "placement", "chosen"),
    [
        ("cpu", "colocated", "gloo"),
        ("cpu", "disaggregated", "gloo"),
        ("cuda", "colocated", "gloo"),  # NCCL has one process on a GPU
        ("cuda", "disaggregated", "nccl"),
    ],
)
def test_peers_send_where_a_worker_needs_what_another_node_has(platform: str, placement: str, chosen: str) -> None:
    assert choose_transport("auto", platform, plan_of("ab", "a"), placement) == chosen


def test_replicas_on_every_node_keep_the_traffic_there() -> None:
    assert choose_transport("auto", "cuda", plan_of("ab", "ab", dp=2), "colocated") == "cuda_ipc"


def test_memory_of_another_node_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"worker 0 needs weights of rank 1 on another \(1 such pairs\); use auto or gl"
    ):
        choose_transport("shared_memory", "cpu", plan_of("ab", "a"), "colocated")


def test_a_transport_of_another_platform_is_refused_when_that_is_known() -> None:
    with pytest.raises(ConfigError, match="rollout.sync=nccl: is not for cpu"):
        choose_transport("nccl", "cpu", plan_of("a", "a"), "colocated")


def test_nccl_is_refused_where_ranks_and_engines_share_gpus() -> None:
    with pytest.raises(ConfigError, match="rollout.sync=nccl: has one process on a GPU"):
        choose_transport("nccl", "cuda", plan_of("a", "a"), "colocated")


def test_the_configuration_knows_the_transports_as_they_are() -> None:
    assert {name: platforms for name, (platforms, _) in SYNCS.items()} == transports.DEVICES
    assert {name for name, (_, at_node) in SYNCS.items() if at_node} == set(transports.MAPPED)


# --- the course of a sync ---------------------------------------------------------------------------------------------


class Stage:
    """Ranks and engines of one script: what they answer, and what they were asked for in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, Callable[..., Any]]) -> None:
        self.answers = dict(answers)
        self.asked: list[str] = []
        monkeypatch.setattr(bridge, "wait_all", self.wait_all)

    def calls(self, method: str, *arguments: Any) -> dict[str, Any]:
        self.asked.append(method)
        who = "engine 0" if method in ("prepare", "receive", "serve", "abandon") else "rank 0"
        return {who: self.answers.get(method, lambda *_: None)(*arguments)}

    def open_sync(self, terms: Mapping[str, Any]) -> dict[str, Any]:
        self.terms = terms
        return {"engine 0": None}

    def meeting_point(self) -> tuple[str, int]:
        return "host", 22000

    @staticmethod
    def wait_all(calls: Mapping[str, Any], doing: str, timeout_s: float) -> dict[str, Any]:
        for answer in calls.values():
            if isinstance(answer, Exception):
                raise answer
        return dict(calls)


PLAN = plan_of("a", "a")
MOVED = sum(PLAN.plan.traffic.values())


def report(update: Mapping[str, Any], **changes: Any) -> list[dict[str, Any]]:
    sums = {"w": 5} if update["checksums"] else {}
    one = {"version": update["version"], "bytes": MOVED, "receive_s": 0.5, "apply_s": 0.25, "checksums": sums}
    return [{**one, **changes}]


ANSWERS: dict[str, Callable[..., Any]] = {
    "open_sync": lambda *_: PLAN.digest,
    "offer_weights": lambda version: {"version": version},
    "receive": report,
    "weight_checksums": lambda: {0: {"w": 5}},
}


def opened(monkeypatch: pytest.MonkeyPatch, checksums: bool = False, **changes: Any) -> tuple[WeightBridge, Any]:
    stage: Any = Stage(monkeypatch, {**ANSWERS, **changes})
    return WeightBridge(PLAN, "shared_memory", checksums, 9.0, stage, stage), stage


def test_a_sync_makes_room_offers_moves_and_serves_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, stage = opened(monkeypatch)
    figures = weights.sync(stage, stage)
    assert stage.asked == ["open_sync", "prepare", "offer_weights", "send_weights", "receive", "serve"]
    assert (figures["sync/version"], figures["sync/bytes"]) == (1, figures["sync/bytes_minimum"])
    assert figures["timing_s/sync_transfer"] == 0.5
    assert weights.sync(stage, stage)["sync/version"] == 2


def test_checksums_are_compared_before_the_engines_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, stage = opened(monkeypatch, checksums=True)
    weights.sync(stage, stage)
    assert stage.asked[-2:] == ["weight_checksums", "serve"]


def test_a_checksum_that_differs_names_the_tensor_and_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, stage = opened(monkeypatch, checksums=True, weight_checksums=lambda: {0: {"w": 6}})
    with pytest.raises(InfrastructureError, match="version 1 failed.*unusable: checksums differ of w on worker 0"):
        weights.sync(stage, stage)
    assert "serve" not in stage.asked
    assert stage.asked[-1] == "abandon"


def test_another_version_than_was_sent_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, stage = opened(monkeypatch, receive=lambda update: report(update, version=7))
    with pytest.raises(InfrastructureError, match=r"versions \[7\] instead of 1"):
        weights.sync(stage, stage)
    assert "serve" not in stage.asked


@pytest.mark.parametrize("step", ["prepare", "offer_weights", "send_weights", "receive", "serve"])
def test_a_sync_that_failed_anywhere_is_the_last_one(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    weights, stage = opened(monkeypatch, **{step: lambda *_: InfrastructureError("the process died.")})
    with pytest.raises(InfrastructureError, match="the process died.\n  Start the run again with trainer.resume=true"):
        weights.sync(stage, stage)
    assert stage.asked[-1] == "abandon"
    with pytest.raises(InfrastructureError, match="an earlier weight sync failed: the process died"):
        weights.sync(stage, stage)


def test_a_rank_with_another_plan_is_named_before_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfrastructureError, match="rank 0 plan the weight sync otherwise than the driver"):
        opened(monkeypatch, open_sync=lambda *_: "another")


def test_everybody_is_told_the_same_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def open_sync(*arguments: Any) -> str:
        told.append(arguments)
        return PLAN.digest

    stage: Any = Stage(monkeypatch, {"open_sync": open_sync})
    WeightBridge(PLAN, "gloo", False, 9.0, stage, stage)
    [(spec, transport, rendezvous)] = told
    assert SyncSpec.from_json(spec) == PLAN.spec == SyncSpec.from_json(stage.terms["spec"])
    assert (transport, rendezvous) == (stage.terms["transport"], tuple(stage.terms["rendezvous"]))
    assert stage.terms["digest"] == PLAN.digest
