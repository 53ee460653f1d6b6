"""How fast is a weight sync? From two Megatron ranks to two vLLM workers, next to a plain copy of the same bytes.

A model of Qwen2.5-0.5B's shape with random weights in bf16, tensor parallel on both sides, all processes alive from the
start and taking turns. Timed from the trainers' offer to where the shards stand in the workers; the packing that vLLM's
CPU kernels need is much the same for every way, and reported apart: its seconds are taken off. What Gloo moves while a
layer packs is hidden in them, so its sync can beat the plain copy.

    plain    each trainer's bytes for each worker lie in one piece of shared memory, or go in one message of Gloo, to
             one piece of the worker's memory: no tensors, no layers, and memory that has been touched before
    sync     the plan's copies, through the transport of the same kind
    gather   rank 0 gathers whole tensors into a file in shared memory, and every worker loads its part of them

Bars: bytes moved are the least possible; a sync takes at most 1.5 times as long as the plain copy and is at least 3
times faster than the gather path (medians over the rounds); 235B are planned in less than 20 seconds. Ends with the
projection onto clusters, see benchmarks/sync_projection.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import sync_projection
from benchmarks.report import arguments, close

if TYPE_CHECKING:
    from megagent.parallel.reshard.spec import SyncPlan

SLOWER, FASTER = 1.5, 3.0
TRANSPORTS = ("shared_memory", "gloo")
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QUICK = {"num_hidden_layers": 2, "vocab_size": 1024}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7, help="of every way")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="megagent-reshard-") as folder,
        tempfile.TemporaryDirectory(prefix="megagent-reshard-", dir="/dev/shm") as shared,
    ):
        figures = measure(Path(folder) / "model", Path(shared), options)
    bars = {"every byte moves once": figures["bytes_over_minimum"] == 1.0}
    for name in TRANSPORTS:
        bars[f"{name}: at most 1.5 x a plain copy"] = figures[f"{name}_over_plain"] <= SLOWER
        bars[f"{name}: at least 3 x faster than gather"] = figures[f"gather_over_{name}"] >= FASTER
    projected, of_projection = sync_projection.table(options.quick, None if options.json else print)
    return close("reshard", figures | projected, bars | of_projection)


def measure(folder: Path, shared: Path, options: argparse.Namespace) -> dict[str, float]:
    """Both ends, and the medians of all ways. folder: for the model; shared: in shared memory of the node."""
    from megagent.model_source import hf_config_of
    from megagent.parallel.models import architecture_of
    from megagent.parallel.reshard.vllm import Workers
    from tests.parallel import jobs
    from tests.parallel.pool import RankPool
    from tests.parallel.reshard.ends import Engine, Trainers
    from tests.parallel.reshard.plain_copies import PlainReceiver
    from tests.parallel.reshard.sweep import bytes_held, plan_of

    rounds = 2 if options.quick else options.rounds
    write_model(folder, CONFIG | (QUICK if options.quick else {}))
    config = jobs.laid_out(folder, {"tp": 2})
    config.model.dtype = "bf16"
    made = plan_of(config, architecture_of(hf_config_of(str(folder))), Workers(tp=2), "BF16")
    pool = RankPool(2)
    trainers = Trainers(pool, config, trains=False)
    engine = Engine(folder, Workers(tp=2), "bfloat16", PlainReceiver, digests=False)
    figures: dict[str, float] = {"gigabytes": sum(made.plan.traffic.values()) / 1e9}
    moved: list[int] = []
    packing: dict[str, list[float]] = {"sync": [], "gather": []}
    try:
        version = 0
        for transport in TRANSPORTS:
            ways = Ways(trainers, engine, made, transport, shared)
            seconds: dict[str, list[float]] = {"plain": [], "sync": [], "gather": []}
            for number in range(rounds + 1):  # the first is for warmth: pages that are touched for the first time
                for way, taken in seconds.items():
                    version += 1
                    spent, packed, size = getattr(ways, way)(version)
                    if number:
                        taken.append(spent)
                        if way in packing:
                            packing[way].append(packed)
                        if way == "sync":
                            moved.append(size)
                if number and not options.json:
                    row = ", ".join(f"{way} {taken[-1]:.3f} s" for way, taken in seconds.items())
                    print(f"{transport:14} {row}", flush=True)
            medians = {way: statistics.median(taken) for way, taken in seconds.items()}
            figures |= {f"{transport}_{way}_s": value for way, value in medians.items()}
            figures[f"{transport}_gb_per_s"] = figures["gigabytes"] / medians["sync"]
            figures[f"{transport}_over_plain"] = medians["sync"] / medians["plain"]
            figures[f"gather_over_{transport}"] = medians["gather"] / medians["sync"]
    finally:
        engine.close()
        trainers.close()
        pool.close()
    least = sum(bytes_held(made, worker) for worker in range(2))
    ratios = {size / least for size in moved}
    return figures | {
        **{f"{way}_packing_s": statistics.median(taken) for way, taken in packing.items()},
        "bytes_over_minimum": max(ratios, key=lambda r: abs(r - 1)),
    }


class Ways:
    """One transport's plain copy and sync, and the gather path. Each takes a version and returns (seconds without
    packing, seconds of packing, bytes that the workers count), 0 where there are none."""

    def __init__(self, trainers: Any, engine: Any, made: SyncPlan, transport: str, shared: Path) -> None:
        from tests.parallel.pool import free_ports
        from tests.parallel.reshard.ends import Link
        from tests.parallel.reshard.plain_copies import plain_open

        self.trainers, self.engine, self.shared = trainers, engine, shared
        self.link = Link(trainers, engine, made, transport)
        mapped = str(shared) if transport == "shared_memory" else None
        rendezvous = None if mapped else ["127.0.0.1", free_ports(1)[0]]
        traffic = dict(made.plan.traffic)
        trainers.call(plain_open, traffic, mapped, rendezvous)
        engine.call("plain_open", list(traffic.items()), mapped, rendezvous)

    def plain(self, version: int) -> tuple[float, float, int]:
        from tests.parallel.reshard.plain_copies import plain_send

        start = time.perf_counter()
        self.trainers.ask(plain_send)
        self.engine.call("plain_receive")
        self.trainers.answers()
        return time.perf_counter() - start, 0.0, 0

    def sync(self, version: int) -> tuple[float, float, int]:
        start = time.perf_counter()
        reports = self.link.sync(version)
        packing = max(report["apply_s"] for report in reports)
        return time.perf_counter() - start - packing, packing, sum(report["bytes"] for report in reports)

    def gather(self, version: int) -> tuple[float, float, int]:
        file = self.shared / "gathered.safetensors"
        start = time.perf_counter()
        self.trainers.call("publish_weights", str(file), version)
        packing = max(packed for _, packed in self.engine.call("load_golden", str(file), version))
        seconds = time.perf_counter() - start - packing
        file.unlink()
        return seconds, packing, 0


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Random weights, small enough that nothing overflows."""
    import torch
    from safetensors.torch import save_file

    from megagent.parallel.models import architecture_of

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02, generator=generator)
            for name, shape in architecture_of(config).hf_shapes().items()
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main())
