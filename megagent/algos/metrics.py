"""What credit assignment made of a batch, by the names of verl's dashboards where it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagent.algos.adjust import real_rows
from megagent.algos.correction import correction_metrics
from megagent.algos.gigpo import step_groups
from megagent.batch import StepBatch

if TYPE_CHECKING:
    from megagent.config import AlgoConfig


def credit_metrics(batch: StepBatch, algo: AlgoConfig | None = None) -> dict[str, float]:
    """name -> figure over the rows of a batch with token_rewards, returns and advantages; padding counts nowhere.

    step_group/lone_ratio is the share of rows that no other row can be compared with: near 1, the step advantage says
    nothing and the anchor is too fine. algo: how steps are grouped (exactly by default); with it come the figures of
    correction_metrics. Empty for a batch without rows.
    """
    batch = real_rows(batch)
    if len(batch) == 0:
        return {}
    group_sizes = torch.bincount(step_groups(batch, algo)).to(torch.float64)
    return {
        **_range("critic/rewards", batch["token_rewards"].sums()),
        **_range("critic/returns", batch["returns"]),
        **_range("critic/advantages", batch["advantages"].values[batch["response_mask"].values != 0]),
        "step_group/size/mean": float(group_sizes.mean()),
        "step_group/lone_ratio": float((group_sizes == 1).sum() / len(batch)),
        **(correction_metrics(batch, algo) if algo is not None else {}),
    }


def _range(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    return {
        f"{name}/mean": float(values.to(torch.float64).mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
