"""Which GPUs ranks and engines get, on the answers of a cluster that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

from megagent.cluster import placement
from megagent.cluster.placement import Placement
from megagent.config import Config
from megagent.errors import ConfigError
from megagent.parallel.reshard.spec import Device


def node(letter: str) -> str:
    """A node's id as Ray writes them."""
    return letter * 56


class Group:
    """Stands in for a placement group: notes how many bundles were asked for."""

    def __init__(self, bundles: Sequence[Any], strategy: str) -> None:
        self.bundles = bundles

    def wait(self, timeout_seconds: float) -> bool:
        return True


def placed(monkeypatch: pytest.MonkeyPatch, gpus: str, ranks: int, **rollout: Any) -> Placement:
    """gpus: those of the bundles, in the order in which Ray hands them out, as node and index ("a0 b1")."""
    config = Config()
    config.parallel.dp = ranks
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    places = [(node(each[0]), int(each[1])) for each in gpus.split()]

    monkeypatch.setattr(placement, "placement_group", Group)
    monkeypatch.setattr(placement, "GpuProbe", MagicMock())
    monkeypatch.setattr(placement, "wait_all", lambda calls, *_: dict(zip(calls, places, strict=True)))
    monkeypatch.setattr(placement.ray, "kill", lambda _: None)
    monkeypatch.setattr(Placement, "_bundle", lambda self, bundle: {"bundle": bundle})
    return Placement(config, "cuda")


def seen(found: Placement, engine: int) -> str:
    return found.engine_options(engine)["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"]


def test_colocated_engines_share_the_gpus_of_consecutive_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = placed(monkeypatch, "a1 a0 b1 b0", ranks=4, tp=2, engines=2, sync="nccl")
    assert [seen(found, engine) for engine in (0, 1)] == ["0,1", "0,1"]
    assert found.engine_options(1)["scheduling_strategy"].node_id == node("b")
    ranks, workers = found.devices([*map(node, "aabb")], [*map(node, "ab")])
    assert ranks == workers == (Device(node("a"), 0), Device(node("a"), 1), Device(node("b"), 0), Device(node("b"), 1))


def test_disaggregated_engines_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = placed(monkeypatch, "a0 a1 a2 a3", ranks=2, tp=1, engines=2, placement="disaggregated", sync="nccl")
    assert found.group is not None
    assert len(found.group.bundles) == 4
    assert [seen(found, engine) for engine in (0, 1)] == ["2", "3"]
    assert [found.rank_options(rank) for rank in (0, 1)] == [{"bundle": 0}, {"bundle": 1}]
    _, workers = found.devices([node("a")] * 2, [node("a")] * 2)
    assert workers == (Device(node("a"), 2), Device(node("a"), 3))


def test_an_engine_that_reads_memory_sees_the_gpus_of_others_after_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = placed(monkeypatch, "a0 a1 a2 a3", ranks=4, tp=2, engines=2, sync="auto")
    assert [seen(found, engine) for engine in (0, 1)] == ["0,1,2,3", "2,3,0,1"]


def test_a_disaggregated_engine_does_not_span_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engines \[0\] would span two nodes"):
        placed(monkeypatch, "a0 a1 b0", ranks=1, tp=2, placement="disaggregated")


def test_on_cpu_a_device_is_a_node() -> None:
    config = Config()
    config.rollout.tp = 2
    ranks, workers = Placement(config, "cpu").devices(["a"], ["a", "b"])
    assert ranks == (Device("a"),)
    assert workers == (Device("a"), Device("a"), Device("b"), Device("b"))
