"""Where ranks and engines run.

CPU: everything shares the machine, and no resource is reserved.
CUDA: one GPU a rank, reserved in a placement group. An engine shares the GPUs of `rollout.tp` consecutive ranks of one
node (colocated), or has as many of its own in the same group (disaggregated); CUDA_VISIBLE_DEVICES tells it which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megagent.cluster.calls import wait_all
from megagent.config import Config
from megagent.errors import ConfigError, InfrastructureError
from megagent.parallel.reshard.spec import Device


@ray.remote
class GpuProbe:
    def where(self) -> tuple[str, int]:
        context = ray.get_runtime_context()
        return context.get_node_id(), int(context.get_accelerator_ids()["GPU"][0])


class Placement:
    def __init__(self, config: Config, platform: str) -> None:
        """platform: cpu or cuda, as resolved for the run."""
        self.config = config
        self.group: PlacementGroup | None = None
        self.gpus: list[tuple[str, int]] = []  # of each rank, then of engines' own: node id, index of the GPU there
        if platform == "cuda":
            self._reserve()

    @property
    def _first_of_engines(self) -> int:
        """Position in `gpus` of the first engine's first GPU."""
        return self.config.parallel.world if self.config.rollout.placement == "disaggregated" else 0

    def _gpus_of(self, engine: int) -> list[tuple[str, int]]:
        tp = self.config.rollout.tp
        start = self._first_of_engines + engine * tp
        return self.gpus[start : start + tp]

    def _reserve(self) -> None:
        rollout, world, timeout_s = self.config.rollout, self.config.parallel.world, self.config.cluster.timeout_s
        wanted = max(world, self._first_of_engines + rollout.tp * rollout.engines)
        self.group = placement_group([{"GPU": 1, "CPU": 1}] * wanted, strategy="PACK")
        if not self.group.wait(timeout_seconds=timeout_s):
            have = int(ray.cluster_resources().get("GPU", 0))
            raise InfrastructureError(
                f"parallel: {world} ranks want one GPU each, and engines {wanted - world} of their own; Ray could not "
                f"reserve them within {timeout_s:.0f} s (the cluster has {have}). Lower parallel.tp, pp or dp, or "
                "rollout.tp or engines, or add nodes."
            )
        probes = [GpuProbe.options(**self._bundle(rank)).remote() for rank in range(wanted)]
        places = wait_all({f"bundle {i}": p.where.remote() for i, p in enumerate(probes)}, "placement", timeout_s)
        for probe in probes:
            ray.kill(probe)
        # Bundles come in any order: ranks are numbered node by node, so that tensor-parallel peers share a node.
        self.order = sorted(range(wanted), key=lambda bundle: places[f"bundle {bundle}"])
        self.gpus = [places[f"bundle {bundle}"] for bundle in self.order]
        self._check_engines()

    def _check_engines(self) -> None:
        tp, engines, world = self.config.rollout.tp, self.config.rollout.engines, self.config.parallel.world
        if self._first_of_engines == 0 and tp * engines > world:
            problem = (
                f"rollout: engines {engines} x tp {tp} want {tp * engines} GPUs, and engines share those of the "
                f"{world} training ranks; lower rollout.engines or rollout.tp"
            )
            raise ConfigError([problem])
        split = [engine for engine in range(engines) if len({node for node, _ in self._gpus_of(engine)}) != 1]
        if split:
            problem = (
                f"rollout.tp={tp}: engines {split} would span two nodes, and an engine stays on one; "
                "choose a rollout.tp that divides the GPUs of a node"
            )
            raise ConfigError([problem])

    def _bundle(self, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return {"num_gpus": 1, "num_cpus": 1, "scheduling_strategy": strategy}

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Ray options of the actor of a rank."""
        if self.group is None:
            return {"num_cpus": 0}
        return self._bundle(self.order[rank])

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Ray options of the actor of an engine."""
        if self.group is None:
            return {"num_cpus": 0}
        gpus = self._gpus_of(engine)
        node = gpus[0][0]
        seen = [index for _, index in gpus]
        if self.config.rollout.sync in ("auto", "cuda_ipc"):
            # vLLM takes the first ones; the others are those whose memory a worker may have to read weights from.
            seen += [index for other, index in self.gpus if other == node and index not in seen]
        return {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))}},
        }

    def devices(
        self, rank_nodes: Sequence[str], engine_nodes: Sequence[str]
    ) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
        """(those of all ranks, those of all engines' workers), as SyncSpec takes them.

        rank_nodes, engine_nodes: where Ray has put them; on CUDA the GPUs say it.
        """
        tp = self.config.rollout.tp
        if self.group is None:
            targets = [Device(node) for node in engine_nodes for _ in range(tp)]
            return tuple(Device(node) for node in rank_nodes), tuple(targets)
        ranks = self.gpus[: len(rank_nodes)]
        workers = [gpu for engine in range(len(engine_nodes)) for gpu in self._gpus_of(engine)]
        return tuple(Device(*gpu) for gpu in ranks), tuple(Device(*gpu) for gpu in workers)
