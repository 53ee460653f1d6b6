from __future__ import annotations

import pytest
import torch

from megagent.algos import choices
from megagent.algos.adjust import align
from megagent.algos.choices import algo_problems
from megagent.algos.correction import correct_for_sampler
from megagent.algos.kl import KL_ESTIMATORS
from megagent.algos.losses import SURROGATES
from megagent.batch import Jagged, StepBatch, objects
from megagent.config import AlgoConfig, Config
from megagent.config_check import values


def problems(**changes: object) -> list[str]:
    return algo_problems(Config(algo=AlgoConfig(**changes)))  # type: ignore[arg-type]


def test_the_default_recipe_has_no_problems() -> None:
    assert problems() == []


def test_the_names_known_without_torch_are_those_of_the_registries() -> None:
    assert tuple(KL_ESTIMATORS) == choices.KL_ESTIMATORS
    assert tuple(SURROGATES) == choices.LOSSES


def test_every_choice_is_of_a_key_that_exists_and_may_have_its_default() -> None:
    defaults = dict(values(Config()))
    for key, names in choices.CHOICES.items():
        assert defaults[key] in names


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"compat": "verl_agent", "estimator": "grpo", "lone_step": "raw"},
            "the reference has no algo.estimator=grpo (there: gigpo), algo.lone_step=raw (there: zero)",
        ),
        ({"estimator": "gae", "adjust": "copy"}, "a copied row is a step that its episode took twice"),
        ({"estimator": "gae", "adjust": "delete"}, "a deleted row takes its reward out of its episode"),
        ({"kl_target": 0.1}, "algo.kl_target=0.1: the coefficient adapts where the KL is part of the reward"),
        ({"kl_target": 0.1, "kl_in": "reward", "kl_coef": 0.0}, "algo.kl_coef=0 would stay 0 for ever"),
        ({"kl_in": "reward", "kl_estimator": "k3+"}, "use algo.kl_estimator=k3"),
        ({"kl_in": "reward", "kl_estimator": "k1", "estimator": "step_returns"}, "use algo.kl_in=loss"),
        ({"loss": "gspo", "dual_clip": 3.0}, "algo.loss=gspo has no dual clip; leave it 0"),
        ({"dual_clip": 0.5}, "algo.dual_clip=0.5: at a ratio of 1 it would hold back every bad token"),
    ],
)
def test_what_does_not_go_together_is_told_with_its_fix(changes: dict[str, object], sentence: str) -> None:
    [problem] = problems(**changes)
    assert sentence in problem


def test_all_problems_are_told_together() -> None:
    assert len(problems(kl_target=0.1, dual_clip=0.5, estimator="gae", adjust="copy")) == 3


def test_over_the_tokens_of_a_step_any_adjustment_will_do() -> None:
    for adjustment in choices.ADJUSTMENTS:
        assert problems(estimator="gae", gae_over="tokens", adjust=adjustment) == []


def test_every_correction_and_adjustment_that_may_be_chosen_exists() -> None:
    one = torch.ones(1, dtype=torch.int64)
    columns = {name: Jagged(torch.ones(1), one) for name in ("response_mask", "advantages", "old_log_probs")}
    batch = StepBatch({**columns, "rollout_log_probs": columns["old_log_probs"], "uid": objects(["task"])})
    for correction in choices.CORRECTIONS:
        corrected = correct_for_sampler(batch, AlgoConfig(sampler_correction=correction))
        assert corrected["advantages"].values.tolist() == [1.0]
    for adjustment in choices.ADJUSTMENTS:
        assert len(align(batch, 4, adjustment)) == 4
