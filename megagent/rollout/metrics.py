"""What a rollout says about the policy. Names are those of verl's dashboards where it has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megagent.algos.penalty import valid_action_ratio
from megagent.batch import StepBatch
from megagent.observe.intervals import wilson_interval
from megagent.rollout.episode import Episode


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

    With both in fp32 only rounding is left (about 1e-5); a larger mean says that the engine serves other weights or
    another distribution than the trainer thinks. rows needs rollout_log_probs, old_log_probs and response_mask.
    """
    difference = (rows["rollout_log_probs"].values - rows["old_log_probs"].values)[rows["response_mask"].values != 0]
    absolute = difference.abs().double()
    return {
        "sampler/log_prob_diff/mean": float(absolute.mean()),
        "sampler/log_prob_diff/max": float(absolute.max()),
        # k3 estimator of KL(sampler || trainer): never negative, 0 when they agree
        "sampler/kl": float((torch.exp(-difference.double()) - 1 + difference.double()).mean()),
    }


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
