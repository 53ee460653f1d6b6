"""What trainer and rollout engines agree on before the first byte: each makes the same plan from it, for itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megagent.parallel.degrees import Degrees
from megagent.parallel.models.architecture import Architecture
from megagent.parallel.reshard import megatron, vllm
from megagent.parallel.reshard.plan import Plan, make_plan
from megagent.parallel.reshard.rounds import Rounds, cut_rounds
from megagent.parallel.reshard.vllm import Workers

BUFFER_BYTES = 64 << 20
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Device:
    """Where a rank or worker lives: node by name, index of the GPU there (0 on CPU)."""

    node: str
    gpu: int = 0


@dataclass(frozen=True)
class SyncSpec:
    """The terms of a weight sync, as JSON says them too.

    degrees: of the Megatron ranks; workers: of the engines; dtypes as safetensors writes them; sources, targets: the
    device of each Megatron rank and each worker; buffer_bytes: the most that one rank sends another at once;
    timeout_s: the longest that one side waits for the other at any point.
    """

    degrees: Degrees
    workers: Workers
    source_dtype: str
    target_dtype: str
    sources: tuple[Device, ...]
    targets: tuple[Device, ...]
    buffer_bytes: int = BUFFER_BYTES
    timeout_s: float = TIMEOUT_S

    def distance(self, source_rank: int, target_rank: int) -> int:
        """0: on one device, 1: on one node, 2: on different nodes."""
        source, target = self.sources[source_rank], self.targets[target_rank]
        return 0 if source == target else 1 if source.node == target.node else 2

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SyncSpec:
        """Raises TypeError or KeyError for what as_json does not write."""
        places = {name: tuple(Device(**each) for each in values[name]) for name in ("sources", "targets")}
        parts = {"degrees": Degrees(**values["degrees"]), "workers": Workers(**values["workers"])}
        return cls(**{**values, **places, **parts})


@dataclass(frozen=True)
class SyncPlan:
    """A checked plan and its rounds, made from the terms and the model's architecture alone."""

    spec: SyncSpec
    plan: Plan
    rounds: Rounds

    @cached_property
    def digest(self) -> str:
        """Equal on all who made the same plan and cut it into the same rounds."""
        return hashlib.sha256(f"{self.plan.digest()} {self.spec.buffer_bytes}".encode()).hexdigest()


def make_sync_plan(spec: SyncSpec, architecture: Architecture) -> SyncPlan:
    """The plan of a sync. Raises ConfigError for degrees or workers that cannot hold the model, MegagentError for a
    plan that would not write every element of every worker exactly once."""
    plan = make_plan(
        megatron.layout(architecture, spec.degrees, spec.source_dtype),
        vllm.layout(architecture, spec.workers, spec.target_dtype),
        cast=True,
        distance=spec.distance,
    )
    plan.check()
    return SyncPlan(spec, plan, cut_rounds(plan, spec.buffer_bytes))
