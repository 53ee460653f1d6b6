"""GRPO over episodes: how an episode did against the others of its task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megagent.algos.groups import normalise, number, padding_rows, spread_over_loss_tokens
from megagent.batch import Jagged, StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def episode_advantages(batch: StepBatch, algo: AlgoConfig) -> Tensor:
    """[rows] float32: the row's score against all rows of its task.

    The score is the sum of the row's token_rewards: its episode's reward, less the row's own penalty. Statistics run
    over all rows of the uid, so an episode counts once for each of its steps; a uid with one row keeps its score.
    Padding rows get 0 and change no statistic.
    Source: GRPO (arXiv 2402.03300) as verl-agent applies it to step rows.
    """
    groups = number(batch["uid"], skip=padding_rows(batch))
    return normalise(batch["token_rewards"].sums(), groups, algo.norm, lone="keeps")


def grpo_advantages(batch: StepBatch, algo: AlgoConfig) -> Jagged:
    """Jagged float32 over the responses: the episode advantage on every token that carries loss.

    Needs uid, token_rewards and response_mask.
    """
    return spread_over_loss_tokens(batch, episode_advantages(batch, algo))
