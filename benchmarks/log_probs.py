"""Peak memory and time of the loss step at a real vocabulary: log-probs, entropy and their gradients.

The shape is that of Qwen2.5-0.5B (151,936 words, 896 hidden) with a micro-batch of 8 responses of 256 tokens, float32.
The naive way is what most trainers write: logits of all tokens, log_softmax in float32, gather, entropy, backward.
Each way runs in a process of its own, which reports how far its peak lies above what it held before the step (hidden
states, weight); gradients of both are results of the step and count on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import arguments, close

VOCAB, HIDDEN, TOKENS = 151_936, 896, 2048
QUICK_VOCAB, QUICK_TOKENS = 151_936, 256
MIB = 1 << 20


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--way", choices=("fused", "naive"), help="measure one way in this process (used by itself)")
    options = parser.parse_args()
    vocab, tokens = (QUICK_VOCAB, QUICK_TOKENS) if options.quick else (VOCAB, TOKENS)
    if options.way:
        print(json.dumps(measure(options.way, vocab, tokens)))
        return 0
    results = {way: _in_process(way, options.quick) for way in ("naive", "fused")}
    naive, fused = results["naive"], results["fused"]
    ratio = naive["peak_mib"] / fused["peak_mib"]
    difference = abs(naive["checksum"] - fused["checksum"]) / abs(naive["checksum"])
    if not options.json:
        print(f"{tokens} response tokens, vocabulary {vocab}, hidden {HIDDEN}, float32")
        for way, result in results.items():
            print(f"  {way:6s} peak {result['peak_mib']:7.0f} MiB above rest   {result['seconds']:6.2f} s")
        print(f"  memory {ratio:.1f} times below the naive way")
    figures = {
        "tokens": tokens,
        "naive_peak_mib": naive["peak_mib"],
        "fused_peak_mib": fused["peak_mib"],
        "memory_ratio": ratio,
        "naive_seconds": naive["seconds"],
        "fused_seconds": fused["seconds"],
        "relative_difference": difference,
    }
    bars = {"same numbers": difference < 1e-4}
    if not options.quick:
        bars["peak memory at least 3 times below"] = ratio >= 3
    return close("log_probs", figures, bars)


def _in_process(way: str, quick: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.log_probs", "--way", way, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    return json.loads(done.stdout.splitlines()[-1])


def measure(way: str, vocab: int, tokens: int) -> dict[str, float]:
    """Peak above rest in MiB, seconds of the step, and a sum over its gradients."""
    import torch
    from torch import Tensor

    from megagent.parallel.log_probs import Scoring, token_log_probs

    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)

    def naive() -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
        return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def fused() -> tuple[Tensor, Tensor]:
        return token_log_probs(hidden, weight, targets, None, vocab=vocab, scoring=Scoring(entropy_gradient=True))

    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"naive": naive, "fused": fused}
    hidden[:8].matmul(weight[:8].detach().t())  # the matrix library's own scratch memory
    before = _memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    log_probs, entropy = ways[way]()
    (-log_probs.mean() - 0.01 * entropy.mean()).backward()
    seconds = time.perf_counter() - start
    peak = _memory_mib("VmHWM") - before
    gradients = [leaf.grad for leaf in (hidden, weight) if leaf.grad is not None]
    checksum = sum(float(gradient.double().abs().sum()) for gradient in gradients)
    return {"peak_mib": peak, "seconds": seconds, "checksum": checksum}


def _memory_mib(name: str) -> float:
    """A line of /proc/self/status: VmRSS, resident now; VmHWM, the most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError(f"/proc/self/status has no {name}; this benchmark needs Linux")


if __name__ == "__main__":
    sys.exit(main())
