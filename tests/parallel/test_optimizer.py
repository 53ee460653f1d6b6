"""The learning-rate schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagent.config import Config
from tests.parallel import jobs
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow


def rates_job(start: jobs.Start, config: Config, task: str, steps: int) -> list[float]:
    optimizer = start(config, task).policy.optimizer
    rates = []
    for _ in range(steps):
        rates.append(optimizer.lr)
        optimizer.advance()
    return rates


def test_reinforcement_learning_warms_up_from_the_first_iteration_and_stays(ranks: RankPool, tiny_model: Path) -> None:
    config = jobs.make_config(tiny_model, lr=1.0, lr_warmup_iterations=3, iterations=10)
    rates = ranks.run(rates_job, 1, config=config, task="rl", steps=6)[0]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_the_policy_of_a_run_that_begins_with_its_critic_alone_has_the_rest_for_its_decay(
    ranks: RankPool, tiny_model: Path
) -> None:
    config = jobs.make_config(tiny_model, lr=1.0, lr_decay="linear", iterations=6)
    config.algo.estimator, config.critic.warmup_iterations = "gae", 2
    rates = ranks.run(rates_job, 1, config=config, task="rl", steps=5)[0]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_supervised_training_falls_to_nothing_by_a_cosine(ranks: RankPool, tiny_model: Path) -> None:
    config = jobs.make_config(tiny_model)
    config.sft.lr, config.sft.warmup_steps, config.sft.steps = 1.0, 1, 5
    rates = ranks.run(rates_job, 1, config=config, task="sft", steps=6)[0]
    assert rates == pytest.approx([0.5, 1.0, 0.8535534, 0.5, 0.1464466, 0.0], abs=1e-6)
