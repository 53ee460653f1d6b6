"""The names that algo.* may take, and which of them go together.

No torch: a configuration is checked where it is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megagent.config import Config

ESTIMATORS = (
    "gigpo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "step_returns",
    "gae",
)
# They need no other episode of the task; the others compare, and an estimator added elsewhere is taken to.
ALONE = ("reinforce_pp", "remax", "gae")
NORMS = ("mean_norm", "mean_std_norm")
BASELINES = ("step", "trajectory")
STEP_GROUPS = ("exact", "similar")
LONE_STEPS = ("zero", "raw", "task")
GAE_OVER = ("steps", "tokens")
COMPATS = ("none", "verl_agent")
LOSSES = ("ppo", "gspo", "cispo")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
# A + takes the value of the estimator and the gradient of k2, which is that of the KL itself in expectation.
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "k1+", "k3+", "low_var_kl+")
KL_PLACES = ("loss", "reward")
CORRECTIONS = ("none", "token_tis", "sequence_tis", "token_mask", "sequence_mask")
ADJUSTMENTS = ("pad", "copy", "delete")

CHOICES: dict[str, tuple[str, ...]] = {
    "algo.norm": NORMS,
    "algo.baseline": BASELINES,
    "algo.step_groups": STEP_GROUPS,
    "algo.lone_step": LONE_STEPS,
    "algo.gae_over": GAE_OVER,
    "algo.compat": COMPATS,
    "algo.loss": LOSSES,
    "algo.aggregation": AGGREGATIONS,
    "algo.kl_estimator": KL_ESTIMATORS,
    "algo.kl_in": KL_PLACES,
    "algo.sampler_correction": CORRECTIONS,
    "algo.adjust": ADJUSTMENTS,
}

# What an adjustment would do to an episode whose steps are read one after the other.
_MISREAD = {
    "copy": "a copied row is a step that its episode took twice",
    "delete": "a deleted row takes its reward out of its episode",
}


def algo_problems(config: Config) -> list[str]:
    """Sentences (value, rule, fix) for algo.* keys that are sound by themselves and do not go together."""
    algo = config.algo
    problems = []
    if algo.compat == "verl_agent":
        differing = [
            f"{key}={value} (there: {theirs})"
            for key, value, theirs in (
                ("algo.estimator", algo.estimator, "gigpo"),
                ("algo.baseline", algo.baseline, "step"),
                ("algo.lone_step", algo.lone_step, "zero"),
                ("algo.penalty_propagates", algo.penalty_propagates, False),
            )
            if value != theirs
        ]
        if differing:
            problems.append(
                f"algo.compat=verl_agent: the reference has no {', '.join(differing)}; set them so, or algo.compat=none"
            )
    if algo.estimator == "gae" and algo.gae_over == "steps" and algo.adjust in _MISREAD:
        problems.append(
            f"algo.adjust={algo.adjust}: {_MISREAD[algo.adjust]}, and algo.estimator=gae runs along the steps; use "
            "algo.adjust=pad"
        )
    if algo.kl_target and algo.kl_in != "reward":
        problems.append(
            f"algo.kl_target={algo.kl_target}: the coefficient adapts where the KL is part of the reward; set "
            "algo.kl_in=reward, or leave algo.kl_target=0"
        )
    if algo.kl_target and algo.kl_coef == 0:
        problems.append(f"algo.kl_target={algo.kl_target}: algo.kl_coef=0 would stay 0 for ever; give it a start")
    if algo.kl_in == "reward" and algo.kl_estimator.endswith("+"):
        problems.append(
            f"algo.kl_estimator={algo.kl_estimator}: a reward has no gradient that + could change; use "
            f"algo.kl_estimator={algo.kl_estimator.removesuffix('+')}"
        )
    if algo.kl_in == "reward" and algo.kl_coef and algo.estimator == "step_returns":
        problems.append(
            "algo.kl_in=reward: the KL is charged to a row's score, and algo.estimator=step_returns reads its return "
            "alone; use algo.kl_in=loss"
        )
    if algo.dual_clip and algo.loss != "ppo":
        problems.append(f"algo.dual_clip={algo.dual_clip}: algo.loss={algo.loss} has no dual clip; leave it 0")
    if 0 < algo.dual_clip <= 1:
        problems.append(
            f"algo.dual_clip={algo.dual_clip}: at a ratio of 1 it would hold back every bad token; use 3, or 0 for none"
        )
    return problems
