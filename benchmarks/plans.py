"""How long does it take to know where every weight goes? Layouts and plans of published models, to vLLM, on paper.

    python -m benchmarks.plans

Each model as people train it, to engines as people serve it: the layout of all training ranks, the layout of all
workers of the engines, the plan between them, and the check that distrusts the plan. No weight, no GPU, one thread of
plain Python: seconds are those of the processor, what a clock shows where nothing else runs.

Bars: the plan of the 235B mixture to an engine of 16 GPUs below 20 s, layouts and check included; all of them together
below 120 s.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.report import arguments, close
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard import megatron, vllm
from megagent.parallel.reshard.plan import Plan, make_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import REAL

LARGEST = "Qwen/Qwen3-235B-A22B"
CASES = [
    ("Qwen/Qwen2.5-7B", Degrees(tp=4, pp=2), Workers(tp=4, engines=2)),
    ("Qwen/Qwen2.5-72B", Degrees(tp=8, pp=4, vpp=2), Workers(tp=8, engines=4)),
    ("meta-llama/Llama-3.1-8B", Degrees(tp=2, pp=2, dp=2), Workers(tp=8)),
    ("meta-llama/Llama-3.1-70B", Degrees(tp=8, pp=4, count_embedding=True, count_output=True), Workers(tp=16)),
    ("Qwen/Qwen3-32B", Degrees(tp=8, pp=2), Workers(tp=8, engines=2)),
    ("mistralai/Mixtral-8x7B-v0.1", Degrees(tp=2, pp=4, ep=4, dp=2, etp=1), Workers(tp=8, engines=2)),
    (LARGEST, Degrees(tp=4, pp=8, ep=8, dp=2, etp=1), Workers(tp=8, engines=8, expert_parallel=True)),
    (LARGEST, Degrees(tp=4, pp=8, ep=8, dp=2, etp=1), Workers(tp=16, expert_parallel=True)),
    (LARGEST, Degrees(tp=4, pp=8, ep=8, dp=2, etp=1), Workers(tp=16)),
]
QUICK = CASES[:1]
LARGEST_S, ALL_S = 20, 120


@dataclass(frozen=True)
class Measured:
    """Seconds of the processor. layouts: of both sides together."""

    layouts: float
    plan: float
    check: float
    copies: int

    @property
    def seconds(self) -> float:
        return self.layouts + self.plan + self.check


def main() -> int:
    options = arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    cases = QUICK if options.quick else CASES
    if not options.json:
        print("model                         ranks  to vLLM               copies  layouts     plan    check")
    figures: dict[str, float] = {}
    bars: dict[str, bool] = {}
    for name, degrees, workers in cases:
        measured = measure(architecture_of(REAL[name]), degrees, workers)
        engines = f"{workers.engines} x tp {workers.tp}{' experts' if workers.expert_parallel else ''}"
        figures[f"{name} on {degrees.world} to {engines}"] = measured.seconds
        if name == LARGEST:
            bars[f"{LARGEST} to {engines} below {LARGEST_S} s"] = measured.seconds < LARGEST_S
        if not options.json:
            times = f"{measured.layouts:6.2f} s {measured.plan:6.2f} s {measured.check:6.2f} s"
            print(f"{name:29s} {degrees.world:5d}  {engines:18s} {measured.copies:9,d} {times}")
    figures["all"] = sum(figures.values())
    bars[f"all below {ALL_S} s"] = figures["all"] < ALL_S
    return close("plans", figures, bars)


def measure(architecture: Architecture, degrees: Degrees, workers: Workers) -> Measured:
    """Everything anew: nothing that another case has made is used."""
    gc.collect()
    times = [time.process_time()]
    source, target = megatron.layout(architecture, degrees), vllm.layout(architecture, workers)
    times.append(time.process_time())
    plan: Plan = make_plan(source, target)
    times.append(time.process_time())
    plan.check()
    times.append(time.process_time())
    layouts, planning, checking = (after - before for before, after in pairwise(times))
    return Measured(layouts, planning, checking, len(plan.copies))


if __name__ == "__main__":
    sys.exit(main())
