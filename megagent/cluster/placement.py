"""Where ranks and engines run.

CPU: everything shares the machine, and no resource is reserved.
CUDA: one GPU a rank, reserved in a placement group; an engine shares the GPUs of `rollout.tp` consecutive ranks of one
node (colocated), and is told which by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megagent.cluster.calls import wait_all
from megagent.config import Config
from megagent.errors import ConfigError, InfrastructureError


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
        self.gpus: list[tuple[str, int]] = []  # of each rank: node id, index of the GPU there
        if platform == "cuda":
            self._reserve()

    def _reserve(self) -> None:
        world, timeout_s = self.config.parallel.world, self.config.cluster.timeout_s
        self.group = placement_group([{"GPU": 1, "CPU": 1}] * world, strategy="PACK")
        if not self.group.wait(timeout_seconds=timeout_s):
            have = int(ray.cluster_resources().get("GPU", 0))
            raise InfrastructureError(
                f"parallel: {world} ranks want one GPU each, and Ray could not reserve them within {timeout_s:.0f} s "
                f"(the cluster has {have}). Lower parallel.tp, pp or dp, or add nodes."
            )
        probes = [GpuProbe.options(**self._bundle(rank)).remote() for rank in range(world)]
        places = wait_all({f"bundle {i}": p.where.remote() for i, p in enumerate(probes)}, "placement", timeout_s)
        for probe in probes:
            ray.kill(probe)
        # Bundles come in any order: ranks are numbered node by node, so that tensor-parallel peers share a node.
        self.order = sorted(range(world), key=lambda bundle: places[f"bundle {bundle}"])
        self.gpus = [places[f"bundle {bundle}"] for bundle in self.order]
        self._check_engines()

    def _check_engines(self) -> None:
        tp, engines = self.config.rollout.tp, self.config.rollout.engines
        if tp * engines > len(self.gpus):
            problem = (
                f"rollout: engines {engines} x tp {tp} want {tp * engines} GPUs, and engines share those of the "
                f"{len(self.gpus)} training ranks; lower rollout.engines or rollout.tp"
            )
            raise ConfigError([problem])
        split = [
            engine
            for engine in range(self.config.rollout.engines)
            if len({node for node, _ in self.gpus[engine * tp : (engine + 1) * tp]}) != 1
        ]
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
        tp = self.config.rollout.tp
        gpus = self.gpus[engine * tp : (engine + 1) * tp]
        devices = ",".join(str(index) for _, index in gpus)
        return {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(gpus[0][0], soft=False),
            "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": devices}},
        }
