"""How long would a weight sync take on hardware that is not here? The bytes of a plan over the links of a cluster.

A plan says how many bytes go from which GPU to which. The projection is the busiest port's bytes over its rate, then
the packing and unpacking in the GPUs' memory, then a start for each round:

    seconds = max over ports (bytes / (EFFICIENCY x rate))
            + max over GPUs (2 x (bytes sent + bytes received) / (EFFICIENCY x memory rate))
            + rounds x ROUND_S

Every GPU has a port each way to its node and one to the network; where pairs of GPUs have wires of their own, each pair
is a port. What stays on a GPU is read and written once there. Nothing is overlapped with anything, so the projection
errs to the slow side where a transport overlaps; it leaves out what the engine does around a sync (draining, waking).
Bars: every byte of the workers moves once; the slowest of the plans, and one of 235B to tensor-parallel slices of every
expert on 16 workers, takes less than 20 seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import arguments, close
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard.plan import BYTES, Plan
from megagent.parallel.reshard.spec import Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import REAL

EFFICIENCY = 0.8  # of a link's or memory's nominal rate that large copies reach
ROUND_S = 100e-6  # to start a round's kernels and messages
GB = 1e9
PLAN_S = 20.0


@dataclass(frozen=True)
class Interconnect:
    """Nominal rates in bytes a second, each way.

    port: of a GPU towards its node; pair: between two GPUs of a node, where each two have wires of their own; network:
    of a GPU towards other nodes; memory: of a GPU.
    """

    name: str
    port: float
    network: float
    pair: float | None = None
    memory: float = 3350 * GB
    node_gpus: int = 8


NDR = 50 * GB  # one 400 Gb/s adapter a GPU
INTERCONNECTS = (
    # H100 SXM: 18 NVLink4 links of 25 GB/s each way, all into the switches, or 6 of them to each of 3 neighbours.
    Interconnect("NVSwitch, NDR", port=450 * GB, network=NDR),
    Interconnect("NVLink4 mesh of 4, NDR", port=450 * GB, network=NDR, pair=150 * GB, node_gpus=4),
    Interconnect("PCIe5 x16, NDR", port=63 * GB, network=NDR),
)


@dataclass(frozen=True)
class Projection:
    """Seconds of one sync, and bytes of it that stay on a GPU, stay in a node, and cross the network."""

    seconds: float
    same_gpu: int
    same_node: int
    network: int

    @property
    def moved(self) -> int:
        return self.same_gpu + self.same_node + self.network

    def describe(self) -> str:
        shares = (("same GPU", self.same_gpu), ("node", self.same_node), ("network", self.network))
        text = ", ".join(f"{name} {size / self.moved:.0%}" for name, size in shares if size)
        return f"{self.seconds:6.3f} s {self.moved / GB:7.1f} GB ({text})"


def project(
    traffic: Mapping[tuple[int, int], int],
    sources: Sequence[Device],
    targets: Sequence[Device],
    interconnect: Interconnect,
    buffer_bytes: int,
) -> Projection:
    """traffic: of a plan, (source rank, target rank) -> bytes; sources, targets: where each rank lives; buffer_bytes:
    of a pair and round."""
    ports: dict[tuple[Any, ...], float] = defaultdict(float)  # seconds that each is busy
    touched: dict[Device, int] = defaultdict(int)
    near = {"same_gpu": 0, "same_node": 0, "network": 0}
    most = 0
    for (source_rank, target_rank), size in traffic.items():
        source, target = sources[source_rank], targets[target_rank]
        touched[source] += size
        touched[target] += size
        most = max(most, size)
        if source == target:
            near["same_gpu"] += size
            continue
        kind, rate = ("node", interconnect.port) if source.node == target.node else ("network", interconnect.network)
        near["same_node" if kind == "node" else "network"] += size
        ports[kind, "out", source] += size / rate
        ports[kind, "in", target] += size / rate
        if kind == "node" and interconnect.pair is not None:
            ports[kind, source, target] += size / interconnect.pair
    wire = max(ports.values(), default=0.0) / EFFICIENCY
    packing = 2 * max(touched.values(), default=0) / (EFFICIENCY * interconnect.memory)
    return Projection(wire + packing + -(-most // buffer_bytes) * ROUND_S, **near)


@dataclass(frozen=True)
class Case:
    """A model, its Megatron ranks, and engines that have as many GPUs."""

    model: str
    degrees: Degrees
    workers: Workers

    def spec(self, interconnect: Interconnect, colocated: bool) -> SyncSpec:
        """A GPU for each rank; the engines' workers on the same ones, or on nodes of their own."""
        count = self.workers.tp * self.workers.pp * self.workers.engines

        def devices(number: int, of: str) -> tuple[Device, ...]:
            return tuple(
                Device(f"{of}-{gpu // interconnect.node_gpus}", gpu % interconnect.node_gpus) for gpu in range(number)
            )

        return SyncSpec(
            degrees=self.degrees,
            workers=self.workers,
            source_dtype="BF16",
            target_dtype="BF16",
            sources=devices(self.degrees.world, "node"),
            targets=devices(count, "node" if colocated else "engines"),
        )

    @property
    def title(self) -> str:
        sizes = vars(self.degrees)
        ranks = " ".join(f"{name.upper()}{sizes[name]}" for name in ("tp", "pp", "vpp", "ep", "dp") if sizes[name] > 1)
        experts = " EP" if self.workers.expert_parallel else ""
        return f"{self.model.partition('/')[2]}: {ranks} -> {self.workers.engines} x TP{self.workers.tp}{experts}"


CASES = (
    Case("Qwen/Qwen2.5-7B", Degrees(tp=4, dp=2), Workers(tp=2, engines=4)),
    Case("Qwen/Qwen2.5-72B", Degrees(tp=8, pp=4, vpp=2), Workers(tp=8, engines=4)),
    Case("Qwen/Qwen3-235B-A22B", Degrees(tp=4, pp=8, ep=8, etp=1, dp=2), Workers(16, engines=4, expert_parallel=True)),
)
# Every expert cut into 16 slices: the most copies that a model of this size asks for.
LARGEST = Case("Qwen/Qwen3-235B-A22B", Degrees(tp=4, pp=8, ep=8, etp=1, dp=2), Workers(tp=16))


def planned_in(case: Case) -> float:
    """Seconds of making, checking and cutting a plan."""
    spec, architecture = case.spec(INTERCONNECTS[0], colocated=False), architecture_of(REAL[case.model])
    start = time.perf_counter()
    make_sync_plan(spec, architecture)
    return time.perf_counter() - start


def minimum(plan: Plan) -> int:
    """Bytes of everything that the targets hold, without padding: each of them has to come from somewhere."""
    return sum(
        BYTES[tensor.dtype] * sum(math.prod(box.shape) for box in tensor.boxes)
        for tensors in plan.target.tensors.values()
        for tensor in tensors
    )


def table(quick: bool, show: Callable[[str], None] | None = None) -> tuple[dict[str, float], dict[str, bool]]:
    """Figures and bars of all cases; a line of each to `show`."""
    figures: dict[str, float] = {}
    ratios, planning = [], 0.0
    for case in CASES[:1] if quick else CASES:
        architecture = architecture_of(REAL[case.model])
        for placement in ("colocated", "disaggregated"):
            plans: dict[int, SyncPlan] = {}  # by the number of GPUs of a node
            for interconnect in INTERCONNECTS:
                spec = case.spec(interconnect, placement == "colocated")
                if interconnect.node_gpus not in plans:
                    start = time.perf_counter()
                    plans[interconnect.node_gpus] = make_sync_plan(spec, architecture)
                    planning = max(planning, time.perf_counter() - start)
                made = plans[interconnect.node_gpus].plan
                found = project(made.traffic, spec.sources, spec.targets, interconnect, spec.buffer_bytes)
                ratios.append(found.moved / minimum(made))
                name = f"{case.title}, {placement}, {interconnect.name}"
                figures[f"{name}: seconds"] = found.seconds
                if show is not None:
                    show(f"{name:82} {found.describe()}")
    if not quick:
        figures["235B_plan_s"] = planned_in(LARGEST)
        planning = max(planning, figures["235B_plan_s"])
    bars = {
        "every byte of a projected plan moves once": set(ratios) == {1.0},
        "a plan takes less than 20 seconds": planning < PLAN_S,
    }
    return figures | {"slowest_plan_s": planning}, bars


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    return close("sync_projection", *table(options.quick, None if options.json else print))


if __name__ == "__main__":
    sys.exit(main())
