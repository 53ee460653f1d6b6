"""Models, rows and jobs that the tests of megagent.parallel share. Jobs run in the workers of tests.parallel.pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megagent.algos.credit import credit
from megagent.batch import Jagged, StepBatch, objects
from megagent.config import Config

Start = Callable[..., Any]
Layout = dict[str, Any]  # keys of config.parallel that are not the default

VOCAB = 90  # no multiple of 8 x tp: the padded vocabulary is always part of what is tested


def write_tiny_model(folder: Path, **changes: Any) -> None:
    """A random Qwen2 whose biases and norms are not the trivial ones."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
    }
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(Qwen2Config(**(settings | changes))).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def make_config(model: Path, tp: int = 1, pp: int = 1, dp: int = 1, **trainer: Any) -> Config:
    """A configuration for the CPU, every mini-batch of 12 rows. trainer: fields of TrainerConfig."""
    config = Config()
    config.model.path, config.model.dtype = str(model), "fp32"
    config.parallel.tp, config.parallel.pp, config.parallel.dp = tp, pp, dp
    config.cluster.platform, config.cluster.timeout_s = "cpu", 140.0
    settings = {
        "mini_batch_rows": 12,
        "micro_batch_rows": 3,
        "log_prob_micro_batch_rows": 5,
        "lr": 1e-2,
        "weight_decay": 0.1,
        "clip_grad": 0.5,
    }
    for name, value in (settings | trainer).items():
        setattr(config.trainer, name, value)
    return config


def with_large_terms(config: Config) -> Config:
    """Terms of the loss large enough that leaving one out shows."""
    config.algo.entropy_coef, config.algo.kl_coef, config.rollout.temperature = 0.1, 0.2, 0.7
    return config


def laid_out(model: Path, layout: Layout, **trainer: Any) -> Config:
    """As make_config, with these keys of config.parallel."""
    config = make_config(model, **trainer)
    for name, value in layout.items():
        setattr(config.parallel, name, value)
    return config


def ranks_of(layout: Layout) -> int:
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)


def make_rows(rows: int = 12, seed: int = 0) -> StepBatch:
    """Rows of random tokens, ready for an update; some response tokens carry no loss, one response is empty."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, VOCAB, (length,), generator=generator)

    prompts = Jagged.from_list([tokens(1, 20) for _ in range(rows)])
    responses = Jagged.from_list([tokens(2, 9) for _ in range(rows - 1)] + [tokens(0, 1)], dtype=torch.int64)

    def column(scale: float, shift: float = 0.0) -> Jagged:
        return responses.like(scale * torch.randn(responses.tokens, generator=generator) + shift)

    if int(prompts.lengths[-1]) < 2:  # the row without a response still needs something to predict
        prompts = Jagged.from_list([*prompts.rows()[:-1], torch.tensor([1, 2])])
    return StepBatch(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": responses.like((torch.rand(responses.tokens, generator=generator) > 0.2).float()),
            "old_log_probs": column(0.3, -4.5),
            "ref_log_probs": column(0.3, -4.5),
            "advantages": column(1.0),
        }
    )


def make_episodes() -> StepBatch:
    """The rows of make_rows as steps of six episodes of two tasks, as they are collected; the last row is padding."""
    rows = make_rows()
    number = torch.arange(len(rows))
    rewards = torch.tensor([0.0, 10.0, 0.0, 1.0, 0.0, 0.0, 0.0, 3.0, 2.0, 0.0, 5.0, 0.0])
    return rows.without("old_log_probs", "ref_log_probs", "advantages").with_columns(
        uid=objects(f"task {i // 6}" for i in range(len(rows))),
        traj_uid=objects(f"episode {i // 2}" for i in range(len(rows))),
        anchor_obs=objects(f"page {i % 2}" for i in range(len(rows))),
        step_index=number % 2,
        rewards=rewards,
        episode_rewards=rewards.view(6, 2).sum(dim=1).repeat_interleave(2),
        is_action_valid=number % 5 != 3,
        is_padding=number == 11,
    )


def replica_part(rank: Any, rows: StepBatch) -> StepBatch:
    return rows.split(rank.topology.dp)[rank.topology.dp_rank]


def without_schedule(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics but those of how rows were cut, which changes nothing else."""
    return {name: value for name, value in metrics.items() if not name.startswith("schedule/")}


def weights_of(rank: Any) -> dict[str, torch.Tensor]:
    """Full Hugging Face tensors on rank 0, nothing elsewhere."""
    from megagent.parallel import hf_io

    return {name: tensor.clone() for name, tensor in hf_io.gather_hf(rank.policy.stage)}


def log_probs_of(rank: Any, rows: StepBatch, model: str = "actor") -> tuple[torch.Tensor, torch.Tensor] | None:
    answer = rank.log_probs(replica_part(rank, rows), model)
    return None if answer is None else (answer["log_probs"].values, answer["entropy"].values)


def update(start: Start, config: Config, rows: StepBatch, updates: int = 1) -> dict[str, Any]:
    """Log-probs before, metrics of the last of some updates, and log-probs and weights after."""
    rank = start(config)
    before = log_probs_of(rank, rows)
    for _ in range(updates):
        metrics = rank.update(replica_part(rank, rows))
    return {
        "before": before,
        "metrics": without_schedule(metrics),
        "after": log_probs_of(rank, rows),
        "weights": weights_of(rank),
        "speaks": rank.topology.speaks,
        "replica": rank.topology.dp_rank,
    }


def iterations(start: Start, configs: list[Config], rows: StepBatch, count: int) -> list[dict[str, Any]]:
    """For one configuration after the other: what the loop does with rows between rollout and sync, `count` times.

    Log-probs of actor and reference, advantages, update; as `update`, with the metrics of the last time.
    """
    results = []
    for config in configs:
        rank = start(config)
        before = log_probs_of(rank, rows)
        for _ in range(count):
            scored = rows.with_columns(
                old_log_probs=shared_log_probs(rank, rows, "actor"),
                ref_log_probs=shared_log_probs(rank, rows, "reference"),
            )
            metrics = rank.update(replica_part(rank, credit(scored, config.algo)))
        results.append(
            {
                "before": before,
                "metrics": metrics,
                "weights": weights_of(rank),
                "speaks": rank.topology.speaks,
                "replica": rank.topology.dp_rank,
            }
        )
    return results


def shared_log_probs(rank: Any, rows: StepBatch, model: str) -> Jagged:
    """Log-probs of all rows on every rank, as the driver has them; among the speaking ranks, replicas are in order."""
    answer = rank.log_probs(replica_part(rank, rows), model)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, answer)
    return Jagged.concat([part["log_probs"] for part in parts if part is not None])


def supervised(start: Start, config: Config, rows: StepBatch, steps: int = 3) -> dict[str, Any]:
    rank = start(config, "sft")
    metrics = [rank.supervised_update(replica_part(rank, rows)) for _ in range(steps)]
    return {"metrics": metrics, "weights": weights_of(rank)}


def spoken(results: list[dict[str, Any]], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all rows, from the speaking ranks in the order of the replicas."""
    parts = sorted((result["replica"], result[name]) for result in results if result["speaks"])
    return torch.cat([part[0] for _, part in parts]), torch.cat([part[1] for _, part in parts])
