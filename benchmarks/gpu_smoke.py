"""The first minute on a GPU: does the trainer run there, is it right, how fast is it, and what does it hold?

Needs torch and megatron-core and nothing else: no network, no vLLM, no Ray, no checkpoint. One process, one device:
  1. a small float32 model with the same weights here and, in a child process, on the CPU: log-probs, one PPO update and
     log-probs after it must agree, in padded and in packed micro-batches;
  2. a Qwen2.5-shaped model with random weights in bfloat16 (the largest whose estimate fits, or --size): log-probs and
     PPO updates in micro-batches of a fixed number of rows, and in packed ones of as many tokens; tokens/s, MFU, peak
     memory beside its estimate.
--quick does both with tiny models on the CPU, in float32. Ends within five minutes, or says that it did not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import arguments, close
from megagent.algos.shares import token_shares
from megagent.batch import Jagged, StepBatch
from megagent.config import Config
from megagent.parallel import platform

LIMIT_S = 300.0
GIB = 1 << 30
# Dense bfloat16 FLOP/s by a part of the device's name, from the vendor's data sheets.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
}
# How rows become micro-batches: a fixed number, padded to the longest, or end to end up to a number of tokens.
WAYS = ("padded", "packed")


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model, and the rows of the measurement."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    rows: int = 32
    micro_batch_rows: int = 4
    prompt: int = 1792
    response: int = 256

    @property
    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": self.tied,
        }

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_rows * (self.prompt + self.response)

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_weights(self) -> int:
        """Of the matrices of one layer."""
        return 2 * self.hidden * (self.hidden + self.kv_width) + 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_weights + self.vocab * self.hidden * (1 if self.tied else 2)

    def forward_flops(self, rows: StepBatch) -> float:
        """Of the rows without padding: matrices, causal attention, and the output layer on response tokens."""
        lengths = row_lengths(rows).double()
        attention = self.layers * 2 * float(lengths.square().sum()) * self.hidden  # two products over half the square
        matrices = 2 * self.layers * self.layer_weights * float(lengths.sum())
        return matrices + attention + 2 * self.vocab * self.hidden * rows["responses"].tokens

    def bytes_needed(self) -> float:
        """Estimate of the peak of an update: weights, gradients and Adam, activations of one micro-batch, logits.

        bfloat16 weights, float32 gradients, master weights and two moments: 18 bytes a parameter. Activations are what
        the local layers keep for the backward pass, in bfloat16: inputs of norms and matrices, q, k, v and the output
        of attention, both halves of the gate and their product, and where this is not compiled what leads to it.
        """
        gate = 3 if platform.kernels(platform.current().kind).compiled else 6
        per_layer = 8 * self.hidden + 4 * self.kv_width + gate * self.ffn
        tokens = self.micro_batch_tokens
        logits = 4 * (1 << 25) * 4 + self.vocab * self.hidden * 6  # a few chunks; gradient of the output layer
        return 18.0 * self.parameters + 2.0 * tokens * per_layer * self.layers + logits


SIZES = {
    "7b": Shape(28, 3584, 18944, 28, 4, 152064, False),
    "3b": Shape(36, 2048, 11008, 16, 2, 151936, True),
    "1.5b": Shape(28, 1536, 8960, 12, 2, 151936, True),
    "0.5b": Shape(24, 896, 4864, 14, 2, 151936, True),
}
SMALL = Shape(4, 128, 256, 4, 2, 1000, True, rows=8, micro_batch_rows=2, prompt=48, response=16)
QUICK = Shape(2, 64, 128, 4, 2, 5000, True, rows=4, micro_batch_rows=2, prompt=32, response=16)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=tuple(SIZES), help="the model (default: the largest that fits)")
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--reference", action="store_true", help="print the small model's numbers (used by itself)")
    options = parser.parse_args()
    start = time.monotonic()
    here = platform.install("cpu" if options.quick or options.reference else options.platform)
    if options.reference:
        print(json.dumps(small_numbers()))  # in both ways; whoever asked for fewer looks at the first
        return 0
    if not here.is_cuda and not options.quick:
        parser.error("torch sees no CUDA device here; --quick runs on the CPU")
    return measure(options, here, start)


def measure(options: argparse.Namespace, here: platform.Platform, start: float) -> int:
    say: Callable[[str], None] = (lambda _: None) if options.json else lambda text: print(text, flush=True)
    name = torch.cuda.get_device_name() if here.is_cuda else "CPU"
    kernels = platform.kernels(here.kind)
    say(f"{name}, torch {torch.__version__}, {kernels.describe()}")

    # Transformer Engine multiplies float32 as TF32, and attends to packed rows in half precision only.
    exact = kernels.spec == "local"
    ways = WAYS if exact else WAYS[:1]
    difference = worst_difference(small_numbers(ways), reference_numbers(LIMIT_S / 2), ways)
    say(f"small model in float32, {' and '.join(ways)}, against the CPU: largest difference {difference:.1e}")

    shape = QUICK if options.quick else SIZES[options.size] if options.size else largest_that_fits()
    estimate = shape.bytes_needed()
    rows = random_rows(shape)
    tokens = int(row_lengths(rows).sum())
    say(
        f"{shape.parameters / 1e6:,.1f} million parameters; {shape.rows} rows of up to {shape.prompt} + "
        f"{shape.response} tokens, {tokens:,} in all"
    )
    found = throughput(shape, rows, "fp32" if options.quick else "bf16", start)
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    figures: dict[str, float] = {"parameters": shape.parameters, "small_model_difference": difference}
    for way, speed in found.items():
        figures[f"{way}_log_prob_tokens_per_s"] = tokens / speed.log_prob_s
        figures[f"{way}_update_tokens_per_s"] = tokens / speed.update_s
        if peak is not None:
            figures[f"{way}_log_prob_mfu"] = shape.forward_flops(rows) / speed.log_prob_s / peak
            figures[f"{way}_update_mfu"] = 3 * shape.forward_flops(rows) / speed.update_s / peak
        figures[f"{way}_updates"] = speed.updates
        if here.is_cuda:
            figures[f"{way}_peak_gib"] = speed.peak_bytes / GIB
    if here.is_cuda:
        figures["estimated_gib"] = estimate / GIB
    seconds = time.monotonic() - start
    figures["seconds"] = seconds
    for figure, value in figures.items():
        say(f"  {figure:28s} {value:,.4g}")
    bars = {
        "small model as on the CPU": difference < (1e-3 if exact else 2e-2),
        "losses and gradients are finite": all(speed.finite for speed in found.values()),
        "within five minutes": seconds < LIMIT_S,
    }
    if here.is_cuda:
        most = max(speed.peak_bytes for speed in found.values())
        bars["peak memory within 30% of the estimate"] = abs(most / estimate - 1) < 0.3
    return close("gpu_smoke", figures, bars)


def largest_that_fits() -> Shape:
    free, _ = torch.cuda.mem_get_info()
    for shape in SIZES.values():
        if shape.bytes_needed() < 0.9 * free:
            return shape
    raise SystemExit(f"{free / GIB:.0f} GiB of free device memory hold none of the models; give --size to try")


# --- a trainer without anything around it -----------------------------------------------------------------------------


@contextmanager
def trainers(shape: Shape, dtype: str) -> Iterator[dict[str, Any]]:
    """Way -> a Policy on this process' device alone; both have one model, of random weights, and one optimizer."""
    from megagent.parallel import model, models, optimizer, topology
    from megagent.parallel.policy import Policy

    config = Config()
    config.model.dtype = dtype
    config.trainer.mini_batch_rows = shape.rows
    config.trainer.micro_batch_rows = config.trainer.log_prob_micro_batch_rows = shape.micro_batch_rows
    config.trainer.lr = 1e-4 if dtype == "fp32" else 1e-6
    config.cluster.timeout_s = LIMIT_S
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = topology.initialise(config, 0, 1, "127.0.0.1", port)
    try:
        stage = model.build(config, alone, models.architecture_of(shape.hf_config))
        generator = torch.Generator().manual_seed(0)
        for chunk in stage.chunks:
            for name, parameter in chunk.named_parameters():
                _fill(name, parameter.data, generator)
        adam = optimizer.build(config, stage, "rl")
        padded = Policy(config, alone, stage, adam)
        by_tokens = replace(config.trainer, pack_rows=True, micro_batch_tokens=shape.micro_batch_tokens)
        packed = Policy(replace(config, trainer=by_tokens), alone, replace(stage, packs=True), adam)
        packed.reference = padded.reference  # one copy of the weights on the host will do
        yield dict(zip(WAYS, (padded, packed), strict=True))
    finally:
        alone.destroy()


def step_of(policy: Any, rows: StepBatch, shape: Shape, update: int | None = None) -> Any:
    """The micro-batches of a pass over all rows by tokens; None by rows, for the policy cuts them itself."""
    if not policy.config.trainer.micro_batch_tokens:
        return None
    [share] = token_shares(row_lengths(rows), policy.config, shape.hidden, update)
    return share.steps


def row_lengths(rows: StepBatch) -> Tensor:
    return rows["prompts"].lengths + rows["responses"].lengths


def _fill(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Norms 1, biases 0, matrices normal; drawn on the CPU for small models, so that every device gets the same."""
    if weight.dim() == 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    elif weight.numel() < 1 << 20:
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    else:
        weight.normal_(std=0.02)


def random_rows(shape: Shape) -> StepBatch:
    """Rows of random tokens. Prompts get shorter down to half, the last responses are half: as episodes have them."""
    generator = torch.Generator().manual_seed(1)
    prompts_of = torch.linspace(shape.prompt, shape.prompt / 2, shape.rows).long()
    responses_of = torch.full((shape.rows,), shape.response)
    responses_of[-shape.rows // 4 :] = max(shape.response // 2, 1)

    def tokens(lengths: Tensor) -> Jagged:
        return Jagged(torch.randint(0, shape.vocab, (int(lengths.sum()),), generator=generator), lengths)

    responses = tokens(responses_of)
    return StepBatch(
        {
            "prompts": tokens(prompts_of),
            "responses": responses,
            "response_mask": responses.like(torch.ones(responses.tokens)),
            "advantages": responses.like(torch.randn(responses.tokens, generator=generator)),
        }
    )


def small_numbers(ways: Sequence[str] = WAYS) -> dict[str, list[float]]:
    """Way -> log-probs and entropies of the small model, its update's metrics, and log-probs after, one way after the
    other."""
    numbers: dict[str, list[float]] = {}
    rows = random_rows(SMALL)
    with trainers(SMALL, "fp32") as policies:
        for way in ways:
            policy = policies[way]
            before = policy.log_probs(rows, "actor", step_of(policy, rows, SMALL))
            rows = rows.with_columns(old_log_probs=before["log_probs"], ref_log_probs=before["log_probs"])
            metrics = policy.update(rows, step_of(policy, rows, SMALL, policy.updates))
            after = policy.log_probs(rows, "actor", step_of(policy, rows, SMALL))
            numbers[way] = [metrics[name] for name in sorted(metrics)]
            for answer in (before, after):
                numbers[way] += answer["log_probs"].values.tolist() + answer["entropy"].values.tolist()
    return numbers


def reference_numbers(timeout_s: float) -> dict[str, list[float]]:
    """small_numbers() of a process that uses the CPU."""
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_smoke", "--reference"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if answer.returncode:
        raise SystemExit(f"the CPU's process failed:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])


def worst_difference(mine: dict[str, list[float]], other: dict[str, list[float]], ways: Sequence[str]) -> float:
    """Largest difference, relative to numbers above 1; infinite where the two are not alike at all, or no numbers."""
    worst = 0.0
    for way in ways:
        if len(mine[way]) != len(other[way]) or not all(map(math.isfinite, mine[way] + other[way])):
            return math.inf
        pairs = zip(mine[way], other[way], strict=True)
        worst = max(worst, *(abs(one - two) / max(1.0, abs(two)) for one, two in pairs))
    return worst


@dataclass(frozen=True)
class Speed:
    """Of one way: the best seconds of a pass, how many updates there were, whether all their metrics were finite."""

    log_prob_s: float
    update_s: float
    updates: int
    finite: bool
    peak_bytes: float


def throughput(shape: Shape, rows: StepBatch, dtype: str, start: float) -> dict[str, Speed]:
    """Way -> the best of up to three passes after one to warm up. start: of the time that is limited."""
    with trainers(shape, dtype) as policies:
        return {
            way: _speed(policy, rows, shape, deadline=start + part * LIMIT_S)
            for (way, policy), part in zip(policies.items(), (0.5, 0.8), strict=True)
        }


def _speed(policy: Any, rows: StepBatch, shape: Shape, deadline: float) -> Speed:
    cuda = platform.current().is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    log_prob_s, update_s, finite = math.inf, math.inf, True
    for number in range(4):
        if number > 1 and time.monotonic() > deadline:
            break
        begin = _now()
        answer = policy.log_probs(rows, "actor", step_of(policy, rows, shape))
        middle = _now()
        rows = rows.with_columns(old_log_probs=answer["log_probs"], ref_log_probs=answer["log_probs"])
        metrics = policy.update(rows, step_of(policy, rows, shape, policy.updates))
        end = _now()
        finite = finite and all(math.isfinite(value) for value in metrics.values())
        if number:
            log_prob_s, update_s = min(log_prob_s, middle - begin), min(update_s, end - middle)
    peak = float(torch.cuda.max_memory_allocated()) if cuda else math.nan
    return Speed(log_prob_s, update_s, policy.updates, finite, peak)


def _now() -> float:
    if platform.current().is_cuda:
        torch.cuda.synchronize()
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
