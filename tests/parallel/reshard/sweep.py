"""The sweep of weight syncs: which models, from which Megatron layouts, to which engines, and what must hold then.

tests/parallel/reshard/test_sweep.py runs a few of them, `python -m benchmarks.sync_sweep` all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megagent.config import Config
from megagent.model_source import hf_config_of
from megagent.parallel.degrees import degrees_of
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard import vllm
from megagent.parallel.reshard.plan import BYTES
from megagent.parallel.reshard.spec import BUFFER_BYTES, Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel import families, jobs
from tests.parallel.jobs import Layout
from tests.parallel.pool import RankPool
from tests.parallel.reshard.ends import Engine, Link, Trainers, digest, scale

TRANSPORTS = ("shared_memory", "gloo")
ENGINES = {
    "tp1": Workers(),
    "tp2": Workers(tp=2),
    "pp2": Workers(pp=2),
    "ep2": Workers(tp=2, expert_parallel=True),  # of mixtures
}
TOKENS = 6
SMALL_BUFFER = 20_000  # bytes: less than the larger tensors, so that some are cut
AGREEMENT = 1e-4  # of log-probs in fp32

# Heads of 32 are the narrowest that vLLM's attention on CPUs knows; four layers are one for each chunk of pp=2 vpp=2.
_SIZES: dict[str, Any] = {
    "vocab_size": 90,  # padded by Megatron at every tp, and by vLLM
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}


@dataclass(frozen=True)
class Model:
    """A family, and what its config.json says besides."""

    family: str
    changes: Mapping[str, Any]

    @property
    def mixes(self) -> bool:
        return self.family in families.MIXTURES

    @property
    def config(self) -> Any:
        """As transformers has it."""
        import transformers

        bases = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}
        base = (bases | {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"})[self.family]
        settings = _SIZES | dict(self.changes) | {"architectures": [f"{base}ForCausalLM"]}
        return getattr(transformers, f"{base}Config")(**settings)


TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2}
MODELS: dict[str, Model] = {
    "qwen2": Model("qwen2", {}),  # its q, k and v have biases
    "qwen2-tied-1kv": Model("qwen2", {**TIED, "num_key_value_heads": 1}),  # fewer key/value heads than any tp > 1
    "qwen3": Model("qwen3", {}),  # norms of q and k
    "qwen3-tied": Model("qwen3", TIED),
    "llama-biases": Model("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 130}),
    "llama-tied-1kv": Model("llama", {**TIED, "num_key_value_heads": 1}),
    "mistral": Model("mistral", {"sliding_window": None}),
    "qwen3_moe": Model("qwen3_moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "mixtral": Model("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
}


def layouts(mixes: bool) -> Iterator[Layout]:
    """TP 1, 2, 4 x PP 1, 2 x VPP 1, 2, then replicas; of mixtures x EP 1, 2, over tensor ranks and over replicas."""
    for tp in (1, 2, 4):
        for stages in ({}, {"pp": 2}, {"pp": 2, "vpp": 2}):
            # Experts on several tensor ranks ask for sequence parallelism.
            parallel = {"tp": tp, **stages} | ({"sequence_parallel": True} if mixes and tp > 1 else {})
            yield parallel
            if mixes:
                yield parallel | {"ep": 2} | ({"dp": 2} if tp == 1 else {"etp": tp // 2})
    yield {"tp": 2, "dp": 2} | ({"sequence_parallel": True, "ep": 2} if mixes else {})


def engines(mixes: bool) -> list[str]:
    return [name for name, workers in ENGINES.items() if mixes or not workers.expert_parallel]


def plan_of(
    config: Config,
    architecture: Architecture,
    workers: Workers,
    dtype: str = "F32",
    buffer_bytes: int = BUFFER_BYTES,
) -> SyncPlan:
    """From a configuration's Megatron ranks to one engine, all on one node."""
    degrees = degrees_of(config.parallel)
    sources, targets = (Device("here"),) * degrees.world, (Device("here"),) * (workers.tp * workers.pp)
    return make_sync_plan(SyncSpec(degrees, workers, dtype, dtype, sources, targets, buffer_bytes), architecture)


def bytes_held(made: SyncPlan, worker: int) -> int:
    """The least that has to reach a worker: all it holds, without padding."""
    held = made.plan.target.tensors[worker]
    return sum(BYTES[tensor.dtype] * torch.Size(box.shape).numel() for tensor in held for box in tensor.boxes)


def expected_shards(
    architecture: Architecture, tensors: Mapping[str, Tensor], workers: Workers
) -> list[dict[str, str]]:
    """What each worker's parameters must be, straight from the boxes: name -> digest of the bits."""
    found = []
    for held in vllm.layout(architecture, workers, "F32").tensors.values():
        found.append({})
        for tensor in held:
            values = torch.zeros(tensor.shape)
            for box in tensor.boxes:
                values[box.local_slices] = tensors[box.hf][box.hf_slices]
            found[-1][tensor.name] = digest(values)
    return found


def prompts(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 90, (number * 13 + 5,), generator=generator).tolist() for number in range(count)]


def reference(model: Any, prompt: Sequence[int], response: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token by teacher forcing, and of the likeliest token there."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0], log_probs.max(-1).values


class Sweep:
    """A model and an engine; each `check` is syncs from one Megatron layout to it."""

    def __init__(self, model: str, engine: str, folder: Path) -> None:
        self.name = f"{model} -> vLLM {engine}"
        self.workers = ENGINES[engine]
        self.out, self.folder = folder, folder / "model"
        families.save_model(MODELS[model].config, self.folder)
        self.architecture = architecture_of(hf_config_of(str(self.folder)))
        self.version = 0
        self.engine = Engine(self.folder, self.workers)

    def check(self, pool: RankPool, layout: Layout) -> None:
        """Raises AssertionError with what does not hold."""
        config = jobs.laid_out(self.folder, layout)
        made = plan_of(config, self.architecture, self.workers, buffer_bytes=SMALL_BUFFER)
        trainers = Trainers(pool, config)
        try:
            for transport in TRANSPORTS:
                self.version += 1
                self._sync(trainers, made, transport)
        finally:
            trainers.close()

    def close(self) -> None:
        self.engine.close()

    def _sync(self, trainers: Trainers, made: SyncPlan, transport: str) -> None:
        case = f"{self.name} from {made.plan.source.name} by {transport}"
        # Other weights each time: a sync that moves nothing would be seen.
        trainers.call(scale, 1.05 if self.version % 2 else 1 / 1.03)
        exported = self.out / f"export-{self.version}"
        trainers.call("export_hf", str(exported))
        file = exported / "model.safetensors"
        expected = expected_shards(self.architecture, load_file(file), self.workers)

        link = Link(trainers, self.engine, made, transport)
        assert set(link.digests) == {made.digest}, case
        reports = link.sync(self.version)
        received = self.engine.call("shards")
        for worker, report in enumerate(reports):
            assert report["version"] == self.version, case
            assert report["bytes"] == bytes_held(made, worker), case
            wrong = [name for name, bits in expected[worker].items() if received[worker].get(name) != bits]
            assert not wrong, f"{case}: worker {worker} holds other bits of {wrong}"

        if not self.workers.expert_parallel:  # vLLM 0.32 on CPUs dies of computing with experts that it does not hold
            self._compare_log_probs(families.load_model(exported), case)

        self.engine.call("load_golden", str(file), self.version)
        golden = self.engine.call("shards")
        for worker, held in enumerate(expected):
            wrong = [name for name in held if received[worker].get(name) != golden[worker].get(name)]
            assert not wrong, f"{case}: worker {worker} differs from the golden path in {wrong}"

    def _compare_log_probs(self, model: Any, case: str) -> None:
        for prompt, (ids, log_probs) in zip(prompts(), self.engine.log_probs(prompts(), TOKENS), strict=True):
            of_tokens, of_likeliest = reference(model, prompt, ids)
            far = (torch.tensor(log_probs) - of_tokens).abs().max(), (of_tokens - of_likeliest).abs().max()
            assert max(far) < AGREEMENT, (
                f"{case}: log-probs differ by {far[0]:.1e}, from the likeliest's by {far[1]:.1e}"
            )
