"""Every weight sync that a small machine can show, with real Megatron ranks and real vLLM engines.

    python -m benchmarks.sync_sweep --models qwen2 mixtral --engines tp2

All families, tied and untied, from TP 1, 2, 4 x PP 1, 2 x VPP 1, 2 (mixtures x EP 1, 2) to engines of TP 1, TP 2, PP 2
(mixtures: EP 2), through shared memory and through Gloo. After each sync the workers' parameters are what the layout
says and what vLLM loads from the exported weights, bit by bit, greedy log-probs are transformers' to 1e-4 in fp32 (not
of EP 2, which vLLM on CPUs cannot compute with), and each worker got the bytes that it holds, once. Bar: no sync fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import arguments, close

RANKS = 8


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", nargs="+", help="some of the models (default: all)")
    parser.add_argument("--engines", nargs="+", help="some of tp1, tp2, pp2, ep2 (default: all)")
    options = parser.parse_args()
    start = time.monotonic()
    syncs, failures = run(options)
    figures = {"syncs": syncs, "failed_layouts": len(failures), "minutes": (time.monotonic() - start) / 60}
    return close("sync_sweep", figures, {"no sync fails": not failures})


def run(options: argparse.Namespace) -> tuple[int, list[str]]:
    """How many syncs there were, and what failed."""
    # Here, since they take seconds to import.
    from tests.parallel.jobs import ranks_of
    from tests.parallel.pool import JobFailed, RankPool
    from tests.parallel.reshard.sweep import MODELS, TRANSPORTS, Sweep, engines, layouts

    pool = RankPool(RANKS)
    syncs, failures = 0, []
    for model in (options.models or list(MODELS))[: 1 if options.quick else None]:
        mixes = MODELS[model].mixes
        for engine in engines(mixes)[: 1 if options.quick else None]:
            if options.engines and engine not in options.engines:
                continue
            with tempfile.TemporaryDirectory(prefix="megagent-sweep-") as folder:
                sweep = Sweep(model, engine, Path(folder))
                try:
                    for layout in list(layouts(mixes))[: 2 if options.quick else None]:
                        began = time.monotonic()
                        syncs += len(TRANSPORTS)
                        try:
                            sweep.check(pool, layout)
                        except Exception as error:  # whatever it is, the other engines are tried
                            failures.append(f"{sweep.name} {layout}: {error}")
                            print(failures[-1], file=sys.stderr, flush=True)
                            if not isinstance(error, AssertionError | JobFailed):
                                break
                        if not options.json:
                            seconds = time.monotonic() - began
                            print(f"{sweep.name:28} {ranks_of(layout)} ranks {layout}: {seconds:.0f} s", flush=True)
                finally:
                    sweep.close()
    pool.close()
    return syncs, failures


if __name__ == "__main__":
    sys.exit(main())
