"""What a rollout says about the policy. Names are those of verl's dashboards where it has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from megagent.algos.penalty import valid_action_ratio
from megagent.batch import StepBatch
from megagent.errors import InfrastructureError
from megagent.observe.intervals import wilson_interval
from megagent.rollout.episode import Episode

# rollout.agreement_max=0 by model.dtype: what rounding alone, in kernels that differ, stays well below.
AGREEMENT_MAX = {"fp32": 1e-4, "bf16": 0.05}
ROWS_NAMED = 5


def rollout_metrics(episodes: Sequence[Episode], rows: StepBatch) -> dict[str, float]:
    """Success, lengths and validity of an iteration's episodes. rows: theirs, aligned or not.

    Greedy episodes that were played beside them count in rollout/greedy_success and rollout/lost_episodes alone.
    """
    greedy = {episode.greedy.traj_uid: episode.greedy for episode in episodes if episode.greedy is not None}
    lengths = torch.tensor([len(episode.steps) for episode in episodes], dtype=torch.float32)
    real = ~rows["is_padding"]
    responses = rows["responses"].lengths[real].float()
    prompts = rows["prompts"].lengths[real].float()
    return {
        "episode/success_rate": _mean(episode.won for episode in episodes),
        "episode/reward/mean": _mean(episode.reward for episode in episodes),
        "episode/score/mean": _mean(episode.score for episode in episodes),
        "episode/length/mean": float(lengths.mean()),
        "episode/length/max": float(lengths.max()),
        "episode/finished_ratio": _mean(episode.finished for episode in episodes),
        "episode/valid_action_ratio": valid_action_ratio(rows),
        "episode/parsed_reply_ratio": _mean(step.parsed for episode in episodes for step in episode.steps),
        "episode/admissible_action_ratio": _mean(step.admissible for episode in episodes for step in episode.steps),
        "rollout/lost_episodes": float(sum(episode.lost for episode in (*episodes, *greedy.values()))),
        "rollout/rows": float(real.sum()),
        "rollout/padding_rows": float((~real).sum()),
        "rollout/response_tokens": float(responses.sum()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "response_length/mean": float(responses.mean()),
        "response_length/max": float(responses.max()),
        **({"rollout/greedy_success": _mean(episode.won for episode in greedy.values())} if greedy else {}),
    }


def sampler_metrics(rows: StepBatch) -> dict[str, float]:
    """How far the sampler's log-probs are from the trainer's under the same weights, over the loss tokens.

    With both in fp32 only rounding is left (about 1e-6); a larger mean says that the engine serves other weights or
    another distribution than the trainer thinks. rows needs rollout_log_probs, old_log_probs and response_mask.
    """
    difference = _difference(rows)[rows["response_mask"].values != 0]
    absolute = difference.abs()
    return {
        "sampler/log_prob_diff/mean": float(absolute.mean()),
        # The smallest that 99 of 100 tokens do not exceed; torch.quantile takes no more than 16 million.
        "sampler/log_prob_diff/p99": float(absolute.kthvalue(math.ceil(0.99 * len(absolute))).values),
        "sampler/log_prob_diff/max": float(absolute.max()),
        # k3 estimator of KL(sampler || trainer): never negative, 0 when they agree
        "sampler/kl": float((torch.exp(-difference) - 1 + difference).mean()),
    }


def disagreement(rows: StepBatch, most: float) -> str | None:
    """None if the mean difference of `sampler_metrics` is at most `most`, else one text that names the worst rows."""
    mean = sampler_metrics(rows)["sampler/log_prob_diff/mean"]
    if mean <= most:
        return None
    mask = rows["response_mask"]
    counts = mask.values != 0
    totals = mask.like(torch.where(counts, _difference(rows).abs(), 0.0)).sums()  # [rows]
    tokens = mask.like(counts.double()).sums()
    means = (totals / tokens.clamp(min=1)).nan_to_num(nan=math.inf, posinf=math.inf)
    worst: dict[str, float] = {}
    for row in means.argsort(descending=True, stable=True).tolist():
        if len(worst) == ROWS_NAMED or means[row] <= most:
            break
        # A row that was copied to fill a batch is named once.
        worst.setdefault(f"step {int(rows['step_index'][row]) + 1} of {rows['traj_uid'][row]}", float(means[row]))
    named = "; ".join(f"{name}: {value:.2g}" for name, value in worst.items())
    return (
        f"engine and trainer disagree on the sampled tokens: their log-probs differ by {mean:.2g} on average, and "
        f"rollout.agreement_max is {most:g}. {int((means > most).sum())} of {int((tokens > 0).sum())} rows are above "
        f"it, the worst: {named}."
    )


def _difference(rows: StepBatch) -> torch.Tensor:
    """Sampler's log-prob less trainer's of every response token; [tokens]."""
    return (rows["rollout_log_probs"].values - rows["old_log_probs"].values).double()


def require_version(episodes: Sequence[Episode], version: int) -> None:
    """Raises InfrastructureError if any response was sampled with weights of another version."""
    found = {step.version for episode in episodes for step in episode.steps} - {version}
    if found:
        raise InfrastructureError(
            f"responses were sampled with weights of versions {sorted(found, key=str)}, and version {version} was "
            "synced; the batch would not be on-policy. Start the run again with trainer.resume=true."
        )


def validation_metrics(episodes: Sequence[Episode], greedy: bool) -> dict[str, float]:
    """Success over held-out tasks, one episode each, with its 95% Wilson interval."""
    prefix = "val/greedy" if greedy else "val/sampled"
    won = sum(episode.won for episode in episodes)
    low, high = wilson_interval(won, len(episodes))
    return {
        f"{prefix}/success_rate": won / len(episodes),
        f"{prefix}/success_low": low,
        f"{prefix}/success_high": high,
        f"{prefix}/score": _mean(episode.score for episode in episodes),
        f"{prefix}/length": _mean(len(episode.steps) for episode in episodes),
        f"{prefix}/tasks": float(len(episodes)),
    }


def _mean(values: Iterable[float]) -> float:
    collected = [float(value) for value in values]
    return sum(collected) / len(collected)
