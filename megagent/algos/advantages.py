"""The advantage estimators by name. A new one is a function of this signature and one entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from megagent.algos.gae import gae, gae_advantages
from megagent.algos.gigpo import gigpo_advantages
from megagent.algos.grpo import dr_grpo_advantages, grpo_advantages, rloo_advantages
from megagent.algos.reinforce import (
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    step_returns_advantages,
)
from megagent.batch import Jagged, StepBatch
from megagent.errors import MegagentError

if TYPE_CHECKING:
    from megagent.config import AlgoConfig

# Takes the batch with token_rewards and returns in it; gives one advantage per response token, 0 where no loss is.
# Padding rows get 0 and change no statistic. A name added here is added to choices.ESTIMATORS, which knows no torch.
Estimator: TypeAlias = "Callable[[StepBatch, AlgoConfig], Jagged]"

ESTIMATORS: dict[str, Estimator] = {
    "gigpo": gigpo_advantages,
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
    "remax": remax_advantages,
    "step_returns": step_returns_advantages,
    "gae": gae_advantages,
}


def estimate_advantages(batch: StepBatch, algo: AlgoConfig) -> StepBatch:
    """Adds advantages (Jagged float32 over the responses) by the estimator that algo.estimator names.

    With gae also value_targets, what the critic's values should have been.
    """
    if algo.estimator not in ESTIMATORS:
        raise MegagentError(f"algo.estimator={algo.estimator} is unknown; use one of {', '.join(ESTIMATORS)}")
    batch = batch.with_columns(advantages=ESTIMATORS[algo.estimator](batch, algo))
    return batch.with_columns(value_targets=gae(batch, algo)[1]) if algo.estimator == "gae" else batch
