"""The slow golden way: one process, one row at a time, transformers and torch.optim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megagent.batch import StepBatch
from megagent.config import Config
from tests.parallel import families


def load(model: Path) -> torch.nn.Module:
    return families.load_model(model)


def weights_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """The weights as files name them: in memory, transformers keeps the experts of a layer in one tensor."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def row_logits(model: torch.nn.Module, rows: StepBatch, row: int) -> tuple[Tensor, Tensor]:
    """Logits that predict tokens 1.. of prompt + response, and these tokens."""
    tokens = torch.cat([rows["prompts"].row(row), rows["responses"].row(row)])
    return model(tokens[None]).logits[0, :-1], tokens[1:]


def log_probs_of(model: torch.nn.Module, rows: StepBatch, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs, entropies = [], []
    for row in range(len(rows)):
        logits, targets = row_logits(model, rows, row)
        table = torch.log_softmax(logits / temperature, dim=-1)[int(rows["prompts"].lengths[row]) - 1 :]
        log_probs.append(table.gather(1, targets[int(rows["prompts"].lengths[row]) - 1 :, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def adamw(model: torch.nn.Module, config: Config, lr: float) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    betas = (config.trainer.adam_beta1, config.trainer.adam_beta2)
    groups = [{"params": matrices, "weight_decay": config.trainer.weight_decay}, {"params": others, "weight_decay": 0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8)


def advantages_of(rows: StepBatch, config: Config) -> Tensor:
    """[tokens]: gigpo with its defaults, row by row."""
    algo, real = config.algo, [row for row in range(len(rows)) if not rows["is_padding"][row]]
    uid, traj, page = (list(rows[name]) for name in ("uid", "traj_uid", "anchor_obs"))
    fine = {row: 0.0 if rows["is_action_valid"][row] else algo.invalid_action_penalty for row in real}
    score = {row: float(rows["episode_rewards"][row]) - fine[row] for row in real}
    returns: dict[int, float] = {}
    for row in reversed(real):
        later = [other for other in real if other > row and traj[other] == traj[row]]
        discounted = sum(float(rows["rewards"][other]) * algo.gamma ** (n + 1) for n, other in enumerate(later))
        returns[row] = float(rows["rewards"][row]) + discounted
    returns = {row: value - fine[row] for row, value in returns.items()}
    result = rows["response_mask"].rows()
    for row in range(len(rows)):
        total = 0.0
        if row in real:
            task = [score[other] for other in real if uid[other] == uid[row]]
            step = [returns[other] for other in real if (uid[other], page[other]) == (uid[row], page[row])]
            total = score[row] - sum(task) / len(task) + algo.step_weight * (returns[row] - sum(step) / len(step))
        result[row] = result[row] * total
    return torch.cat(result)


def iterate(model: torch.nn.Module, reference: torch.nn.Module, config: Config, rows: StepBatch, count: int) -> Any:
    """What the loop does with rows between rollout and sync, `count` times; the metrics of the last time."""
    optimizer = adamw(model, config, config.trainer.lr)
    responses = rows["responses"]
    for _ in range(count):
        with torch.no_grad():
            old = log_probs_of(model, rows, config.rollout.temperature)[0]
            ref = log_probs_of(reference, rows, config.rollout.temperature)[0]
        scored = rows.with_columns(
            old_log_probs=responses.like(old),
            ref_log_probs=responses.like(ref),
            advantages=responses.like(advantages_of(rows, config)),
        )
        steps = [update(model, optimizer, config, scored) for _ in range(config.trainer.epochs)]
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Config, rows: StepBatch
) -> dict[str, float]:
    """One PPO step on all rows."""
    algo = config.algo
    log_probs, entropy = log_probs_of(model, rows, config.rollout.temperature)
    mask, count = rows["response_mask"].values, rows["response_mask"].values.sum()
    ratio = (log_probs - rows["old_log_probs"].values).exp()
    advantages = rows["advantages"].values
    pg = -torch.minimum(ratio * advantages, ratio.clamp(1 - algo.clip, 1 + algo.clip) * advantages)
    difference = rows["ref_log_probs"].values - log_probs
    kl = (difference.exp() - difference - 1).clamp(max=10)

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum() / count

    def figure(values: Tensor) -> float:
        return mean(values.detach()).item()

    loss = mean(pg) - algo.entropy_coef * mean(entropy) + algo.kl_coef * mean(kl)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip_grad)
    optimizer.step()
    return {
        "actor/pg_loss": figure(pg),
        "actor/kl_loss": figure(kl),
        "actor/entropy": figure(entropy),
        "actor/ppo_kl": figure(rows["old_log_probs"].values - log_probs),
        "actor/grad_norm": float(norm),
    }
