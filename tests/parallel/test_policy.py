"""Log-probs, the PPO update and the supervised one against plain torch, and what must not change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagent.batch import Jagged, StepBatch
from megagent.config import Config
from tests.parallel import jobs, plain
from tests.parallel.pool import JobFailed, RankPool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def updated(ranks: RankPool, tiny_model: Path) -> list[dict[str, Any]]:
    config = jobs.with_large_terms(jobs.make_config(tiny_model, tp=2))
    return ranks.run(jobs.update, 2, config=config, rows=jobs.make_rows())


def test_log_probs_and_entropy_are_those_of_transformers(updated: list[dict[str, Any]], tiny_model: Path) -> None:
    with torch.no_grad():
        expected = plain.log_probs_of(plain.load(tiny_model), jobs.make_rows(), temperature=0.7)
    for mine, theirs in zip(jobs.spoken(updated, "before"), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_ppo_update_is_that_of_plain_torch(updated: list[dict[str, Any]], tiny_model: Path) -> None:
    model = plain.load(tiny_model)
    config = jobs.with_large_terms(jobs.make_config(tiny_model))
    optimizer = plain.adamw(model, config, config.trainer.lr)
    expected = plain.update(model, optimizer, config, jobs.make_rows())
    metrics = updated[0]["metrics"]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    theirs = dict(model.named_parameters())
    for name, weight in updated[0]["weights"].items():
        torch.testing.assert_close(weight, theirs[name].detach(), atol=2e-4, rtol=1e-4, msg=name)


def test_supervised_steps_are_those_of_plain_torch(ranks: RankPool, tiny_model: Path) -> None:
    config = jobs.make_config(tiny_model, tp=2)
    config.sft.lr, config.sft.warmup_steps, config.sft.steps = 1e-2, 0, 10**9  # the cosine has not begun to fall
    rows = _weighted_rows()
    results = ranks.run(jobs.supervised, 2, config=config, rows=rows, steps=2)

    model = plain.load(tiny_model)
    optimizer = plain.adamw(model, config, config.sft.lr)
    for step in range(2):
        total, weight_sum = torch.zeros(()), 0.0
        for row in range(len(rows)):
            logits, targets = plain.row_logits(model, rows, row)
            weights = rows["loss_weights"].row(row)[1:]
            total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="none") @ weights
            weight_sum += float(weights.sum())
        loss = total / weight_sum
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip_grad)
        optimizer.step()
        assert results[0]["metrics"][step]["sft/loss"] == pytest.approx(loss.item(), rel=2e-4)
        assert results[0]["metrics"][step]["sft/grad_norm"] == pytest.approx(norm.item(), rel=2e-3)


def _weighted_rows() -> StepBatch:
    rows = jobs.make_rows()
    lengths = rows["prompts"].lengths + rows["responses"].lengths
    weights = torch.rand(int(lengths.sum()), generator=torch.Generator().manual_seed(3))
    return rows.with_columns(loss_weights=Jagged(weights.round(decimals=1), lengths))


# --- what must not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro_batch_rows", "layout"),
    # The interleaved schedule wants an even number of micro-batches here: 12 rows become two of 6.
    [(1, {}), (5, {}), (12, {}), (5, {"pp": 2}), (5, {"pp": 2, "vpp": 2}), (12, {"pp": 2, "vpp": 2})],
    ids=str,
)
def test_the_cut_into_micro_batches_changes_nothing(
    ranks: RankPool, tiny_model: Path, updated: list[dict[str, Any]], micro_batch_rows: int, layout: jobs.Layout
) -> None:
    config = jobs.with_large_terms(
        jobs.laid_out(tiny_model, layout, micro_batch_rows=micro_batch_rows, log_prob_micro_batch_rows=7)
    )
    other = ranks.run(jobs.update, jobs.ranks_of(layout), config=config, rows=jobs.make_rows())
    assert other[0]["metrics"] == pytest.approx(updated[0]["metrics"], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(jobs.spoken(other, "after")[0], jobs.spoken(updated, "after")[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}], ids=str)
def test_packed_rows_give_the_update_of_padded_ones(
    ranks: RankPool, tiny_model: Path, updated: list[dict[str, Any]], layout: jobs.Layout
) -> None:
    config = jobs.with_large_terms(
        jobs.laid_out(tiny_model, layout, pack_rows=True, micro_batch_rows=3, log_prob_micro_batch_rows=5)
    )
    packed = ranks.run(jobs.update, jobs.ranks_of(layout), config=config, rows=jobs.make_rows())
    assert packed[0]["metrics"] == pytest.approx(updated[0]["metrics"], rel=1e-4, abs=1e-6)
    for when in ("before", "after"):
        found, expected = jobs.spoken(packed, when)[0], jobs.spoken(updated, when)[0]
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def one_row_job(start: jobs.Start, config: Config, rows: StepBatch) -> Any:
    rank = start(config)
    found = jobs.log_probs_of(rank, rows)
    rank.update(rows)
    return found


def test_one_row_is_enough_for_the_interleaved_schedule(ranks: RankPool, tiny_model: Path) -> None:
    row = jobs.make_rows().take([3])
    config = jobs.laid_out(tiny_model, {"pp": 2, "vpp": 2})
    _, found = ranks.run(one_row_job, 2, config=config, rows=row)
    with torch.no_grad():
        expected = plain.log_probs_of(plain.load(tiny_model), row, temperature=1.0)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)


def test_padding_rows_weigh_nothing(ranks: RankPool, tiny_model: Path, updated: list[dict[str, Any]]) -> None:
    rows = jobs.make_rows()
    idle = rows.take([0, 1, 2, 3])
    idle = idle.with_columns(
        response_mask=idle["response_mask"].like(torch.zeros(idle["response_mask"].tokens)),
        advantages=idle["advantages"].like(torch.full((idle["advantages"].tokens,), 1e6)),
    )
    config = jobs.with_large_terms(jobs.make_config(tiny_model, mini_batch_rows=16))
    padded = ranks.run(jobs.update, 1, config=config, rows=StepBatch.concat([rows, idle]))
    assert padded[0]["metrics"] == pytest.approx(updated[0]["metrics"], rel=1e-4, abs=1e-6)


def test_mini_batches_of_padding_only_take_no_step(ranks: RankPool, tiny_model: Path) -> None:
    rows = jobs.make_rows()
    idle = rows.with_columns(response_mask=rows["response_mask"].like(torch.zeros(rows["response_mask"].tokens)))
    result = ranks.run(jobs.update, 1, config=jobs.make_config(tiny_model), rows=idle)[0]
    assert torch.equal(result["before"][0], result["after"][0])


def test_replicas_share_one_denominator(ranks: RankPool, tiny_model: Path, updated: list[dict[str, Any]]) -> None:
    # All loss tokens on one replica: an average of the replicas' means would halve the gradient.
    rows = jobs.make_rows()
    idle = rows.with_columns(response_mask=rows["response_mask"].like(torch.zeros(rows["response_mask"].tokens)))
    config = jobs.with_large_terms(jobs.make_config(tiny_model, dp=2, mini_batch_rows=24))
    lopsided = ranks.run(jobs.update, 2, config=config, rows=StepBatch.concat([rows, idle]))
    assert lopsided[1]["metrics"] == pytest.approx(updated[0]["metrics"], rel=1e-4, abs=1e-6)


# --- reference --------------------------------------------------------------------------------------------------------


def reference_job(start: jobs.Start, config: Config, rows: StepBatch) -> list[Any]:
    rank = start(config)
    seen = [jobs.log_probs_of(rank, rows, "reference"), jobs.log_probs_of(rank, rows, "actor")]
    rank.update(rows)
    for model in ("actor", "reference", "actor"):
        seen.append(jobs.log_probs_of(rank, rows, model))
    rank.update(rows)
    seen.append(jobs.log_probs_of(rank, rows, "reference"))
    return [each[0] for each in seen if each is not None]


@pytest.fixture(scope="module")
def swapped(ranks: RankPool, tiny_model: Path) -> list[Tensor]:
    config = jobs.make_config(tiny_model, tp=2)
    return ranks.run(reference_job, 2, config=config, rows=jobs.make_rows())[0]


def test_the_reference_is_the_actor_before_the_first_update(swapped: list[Tensor]) -> None:
    assert torch.equal(swapped[0], swapped[1])


def test_the_reference_stays_what_the_actor_was_at_first(swapped: list[Tensor]) -> None:
    initial, first_after_update, after_second_update = swapped[0], swapped[3], swapped[5]
    assert torch.equal(initial, first_after_update)
    assert torch.equal(initial, after_second_update)


def test_the_actor_is_back_after_the_reference(swapped: list[Tensor]) -> None:
    updated, restored = swapped[2], swapped[4]
    assert torch.equal(updated, restored)
    assert not torch.equal(updated, swapped[0])


# --- what ends a run --------------------------------------------------------------------------------------------------


def diverging_job(start: jobs.Start, config: Config, rows: StepBatch) -> tuple[str, bool]:
    from megagent.parallel.learner import TrainingDivergedError

    rank = start(config)
    before = [parameter.detach().clone() for parameter in rank.policy.stage.parameters()]
    try:
        rank.update(rows)
    except TrainingDivergedError as error:
        unchanged = all(map(torch.equal, before, rank.policy.stage.parameters()))
        return str(error), unchanged
    return "", False


def test_a_loss_that_is_no_number_ends_the_update_on_every_rank(ranks: RankPool, tiny_model: Path) -> None:
    rows = jobs.make_rows()
    advantages = rows["advantages"].values.clone()
    advantages[rows["response_mask"].values.nonzero()[0]] = float("nan")
    rows = rows.with_columns(advantages=rows["advantages"].like(advantages))
    results = ranks.run(diverging_job, 2, config=jobs.make_config(tiny_model, pp=2), rows=rows)
    for message, unchanged in results:
        assert "optimizer step 0 is nan" in message
        assert unchanged


def test_ranks_and_topology_must_agree(ranks: RankPool, tiny_model: Path) -> None:
    with pytest.raises(JobFailed, match="tp=2 x pp=1 x dp=2 needs 4 ranks but 1"):
        ranks.run(jobs.update, 1, config=jobs.make_config(tiny_model, tp=2, dp=2), rows=jobs.make_rows())


def test_a_model_that_cannot_be_split_is_refused(ranks: RankPool, tiny_model: Path) -> None:
    with pytest.raises(JobFailed, match="parallel.tp=3 does not divide the"):
        ranks.run(jobs.update, 3, config=jobs.make_config(tiny_model, tp=3), rows=jobs.make_rows())
