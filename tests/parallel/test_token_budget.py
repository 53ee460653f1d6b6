"""Micro-batches by tokens: rows dealt to the replicas by their cost give what fixed micro-batches give."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megagent.algos.shares import Share, gathered, token_shares
from megagent.batch import Jagged, StepBatch
from megagent.config import Config
from tests.parallel import jobs
from tests.parallel.jobs import Layout
from tests.parallel.pool import JobFailed, RankPool

pytestmark = pytest.mark.slow

BUDGET = 60  # the longest row has 27 tokens: several rows in a micro-batch, several micro-batches in a mini-batch
LAYOUTS: dict[int, list[Layout]] = {
    1: [{}],
    2: [{"dp": 2}, {"pp": 2}],
    4: [{"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "vpp": 2}],
}
WAYS = [
    (layout, pack_rows)
    for layouts in LAYOUTS.values()
    for layout, pack_rows in itertools.product(layouts, (False, True))
]


def budget_config(model: Path, layout: Layout, **trainer: Any) -> Config:
    """Two epochs of two mini-batches: rows change replicas from one to the next."""
    settings: dict[str, Any] = {"epochs": 2, "lr": 1e-3, "micro_batch_tokens": BUDGET} | trainer
    return jobs.with_large_terms(jobs.laid_out(model, layout, **settings))


def two_mini_batches() -> StepBatch:
    return StepBatch.concat([jobs.make_rows(), jobs.make_rows(seed=1)])


def dealt(rank: Any, config: Config, rows: StepBatch, update: int | None = None) -> Share:
    """This replica's share, as the driver would deal it."""
    lengths = rows["prompts"].lengths + rows["responses"].lengths
    shares = token_shares(lengths, config, rank.policy.stage.architecture.hidden, update)
    return shares[rank.topology.dp_rank]


def budget_jobs(start: jobs.Start, configs: list[Config], rows: StepBatch) -> list[dict[str, Any]]:
    """For one configuration after the other: log-probs and entropy, an update, log-probs and weights."""
    return [_budget_job(start(config), config, rows) for config in configs]


def _budget_job(rank: Any, config: Config, rows: StepBatch) -> dict[str, Any]:
    whole, training = dealt(rank, config, rows), dealt(rank, config, rows, update=0)
    before = rank.log_probs(whole.of(rows), "actor", whole.steps)
    metrics = rank.update(training.of(rows), training.steps)
    after = rank.log_probs(whole.of(rows), "actor", whole.steps)
    return {"share": whole, "before": before, "metrics": metrics, "after": after, "weights": jobs.weights_of(rank)}


@pytest.fixture(scope="module")
def fixed(ranks: RankPool, tiny_model: Path) -> dict[str, Any]:
    """Fixed micro-batches on one rank."""
    config = budget_config(tiny_model, {}, micro_batch_tokens=0)
    return ranks.run(jobs.update, 1, config=config, rows=two_mini_batches())[0]


@pytest.fixture(scope="module")
def by_tokens(ranks: RankPool, tiny_model: Path) -> list[tuple[Layout, list[dict[str, Any]]]]:
    """What every rank says on each layout, padded and packed."""
    found = []
    for world in LAYOUTS:
        ways = [(layout, pack) for layout, pack in WAYS if jobs.ranks_of(layout) == world]
        configs = [budget_config(tiny_model, layout, pack_rows=pack) for layout, pack in ways]
        results = ranks.run(budget_jobs, world, configs=configs, rows=two_mini_batches(), starts=len(ways))
        for number, (layout, pack) in enumerate(ways):
            found.append(({**layout, "pack_rows": pack}, [result[number] for result in results]))
    return found


def whole_batch(results: list[dict[str, Any]], when: str, name: str) -> Jagged:
    """What the speaking ranks say, in the order of the batch."""
    speaking = [result for result in results if result[when] is not None]
    return gathered([result[when][name] for result in speaking], [result["share"] for result in speaking])


def test_log_probs_and_entropy_come_back_as_from_fixed_micro_batches(
    by_tokens: list[tuple[Layout, list[dict[str, Any]]]], fixed: dict[str, Any]
) -> None:
    for layout, results in by_tokens:
        for name, expected in zip(("log_probs", "entropy"), fixed["before"], strict=True):
            found = whole_batch(results, "before", name)
            torch.testing.assert_close(found.values, expected, atol=1e-5, rtol=1e-5, msg=f"{layout}: {name}")


def test_every_rank_reports_the_loss_and_the_gradient_of_fixed_micro_batches(
    by_tokens: list[tuple[Layout, list[dict[str, Any]]]], fixed: dict[str, Any]
) -> None:
    for layout, results in by_tokens:
        for result in results:
            metrics = jobs.without_schedule(result["metrics"])
            assert metrics == pytest.approx(fixed["metrics"], rel=1e-4, abs=1e-6), layout


def test_four_steps_lead_to_the_weights_of_fixed_micro_batches(
    by_tokens: list[tuple[Layout, list[dict[str, Any]]]], fixed: dict[str, Any]
) -> None:
    for layout, results in by_tokens:
        for name, expected in fixed["weights"].items():
            difference = torch.linalg.vector_norm(results[0]["weights"][name] - expected)
            assert difference < 1e-5 * torch.linalg.vector_norm(expected), f"{layout}: {name}"


def test_the_figures_of_the_schedule_are_those_of_the_batch(
    by_tokens: list[tuple[Layout, list[dict[str, Any]]]],
) -> None:
    for layout, results in by_tokens:
        waste = {result["metrics"]["schedule/padding_waste"] for result in results}
        imbalance = {result["metrics"]["schedule/dp_imbalance"] for result in results}
        assert len(waste) == len(imbalance) == 1, layout
        assert (waste == {0.0}) == layout["pack_rows"], layout
        assert (imbalance == {0.0}) == (layout.get("dp", 1) == 1), layout


# --- few rows, other passes -------------------------------------------------------------------------------------------


def few_rows_job(start: jobs.Start, config: Config, rows: StepBatch) -> dict[str, Any]:
    return _budget_job(start(config), config, rows)


def test_one_row_for_four_ranks_leaves_none_waiting(ranks: RankPool, tiny_model: Path) -> None:
    config = budget_config(tiny_model, {"dp": 2, "pp": 2, "vpp": 2})
    results = ranks.run(few_rows_job, 4, config=config, rows=jobs.make_rows().take([3]))
    assert sorted(len(result["share"].rows) for result in results) == [0, 0, 1, 1]
    assert len({result["metrics"]["actor/grad_norm"] for result in results}) == 1
    assert results[0]["metrics"]["actor/grad_norm"] > 0


def other_passes_job(start: jobs.Start, config: Config, rows: StepBatch) -> dict[str, Any]:
    """A critic's update and its values, then a step of supervised training."""
    rank = start(config)
    by_tokens = config.trainer.micro_batch_tokens > 0
    whole = dealt(rank, config, rows) if by_tokens else Share(torch.arange(len(rows)))
    training = dealt(rank, config, rows, update=0) if by_tokens else whole
    metrics = rank.update_critic(training.of(rows), training.steps)
    values = rank.values(whole.of(rows), whole.steps)
    metrics |= start(config, "sft").supervised_update(whole.of(rows), whole.steps)
    return {"share": whole, "metrics": metrics, "values": None if values is None else {"values": values}}


def test_critic_and_supervised_steps_are_those_of_fixed_micro_batches(ranks: RankPool, tiny_model: Path) -> None:
    rows = jobs.make_rows()
    weights = (rows["prompts"].lengths + rows["responses"].lengths).to(torch.float32)
    noise = torch.randn(2, rows["responses"].tokens, generator=torch.Generator().manual_seed(5))
    rows = rows.with_columns(
        values=rows["responses"].like(noise[0]),
        value_targets=rows["responses"].like(3 + noise[1]),
        loss_weights=Jagged.from_list([torch.linspace(0, 1, int(length)) for length in weights]),
    )

    def results(layout: Layout, tokens: int) -> list[dict[str, Any]]:
        config = budget_config(tiny_model, layout, micro_batch_tokens=tokens)
        config.algo.estimator, config.sft.warmup_steps = "gae", 0
        return ranks.run(other_passes_job, jobs.ranks_of(layout), config=config, rows=rows)

    found, expected = results({"dp": 2}, BUDGET), results({}, 0)
    mine, theirs = (jobs.without_schedule(results[0]["metrics"]) for results in (found, expected))
    assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(
        whole_batch(found, "values", "values").values, expected[0]["values"]["values"].values, atol=1e-4, rtol=1e-4
    )


def test_rows_without_their_micro_batches_are_refused(ranks: RankPool, tiny_model: Path) -> None:
    with pytest.raises(JobFailed, match="trainer.micro_batch_tokens=60: rows come with their micro-batches"):
        ranks.run(jobs.update, 1, config=budget_config(tiny_model, {}), rows=jobs.make_rows())
