"""Log-probs, the PPO update and the supervised one against plain torch, and what must not change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagent.batch import Jagged, StepBatch
from megagent.config import Config
from tests.parallel import jobs
from tests.parallel.pool import JobFailed, RankPool

pytestmark = pytest.mark.slow


# --- the slow golden way: one process, one row at a time, transformers and torch.optim --------------------------------


def _load(model: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def _row_logits(model: torch.nn.Module, rows: StepBatch, row: int) -> tuple[Tensor, Tensor]:
    """Logits that predict tokens 1.. of prompt + response, and these tokens."""
    tokens = torch.cat([rows["prompts"].row(row), rows["responses"].row(row)])
    return model(tokens[None]).logits[0, :-1], tokens[1:]


def _plain_log_probs(model: torch.nn.Module, rows: StepBatch, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs, entropies = [], []
    for row in range(len(rows)):
        logits, targets = _row_logits(model, rows, row)
        table = torch.log_softmax(logits / temperature, dim=-1)[int(rows["prompts"].lengths[row]) - 1 :]
        log_probs.append(table.gather(1, targets[int(rows["prompts"].lengths[row]) - 1 :, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def _plain_optimizer(model: torch.nn.Module, config: Config, lr: float) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    betas = (config.trainer.adam_beta1, config.trainer.adam_beta2)
    groups = [{"params": matrices, "weight_decay": config.trainer.weight_decay}, {"params": others, "weight_decay": 0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8)


def _plain_update(model: torch.nn.Module, config: Config, rows: StepBatch) -> dict[str, float]:
    algo = config.algo
    log_probs, entropy = _plain_log_probs(model, rows, config.rollout.temperature)
    mask, count = rows["response_mask"].values, rows["response_mask"].values.sum()
    ratio = (log_probs - rows["old_log_probs"].values).exp()
    advantages = rows["advantages"].values
    pg = -torch.minimum(ratio * advantages, ratio.clamp(1 - algo.clip, 1 + algo.clip) * advantages)
    difference = rows["ref_log_probs"].values - log_probs
    kl = (difference.exp() - difference - 1).clamp(max=10)

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum() / count

    def figure(values: Tensor) -> float:
        return mean(values.detach()).item()

    loss = mean(pg) - algo.entropy_coef * mean(entropy) + algo.kl_coef * mean(kl)
    optimizer = _plain_optimizer(model, config, config.trainer.lr)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip_grad)
    optimizer.step()
    return {
        "actor/pg_loss": figure(pg),
        "actor/kl_loss": figure(kl),
        "actor/entropy": figure(entropy),
        "actor/ppo_kl": figure(rows["old_log_probs"].values - log_probs),
        "actor/grad_norm": float(norm),
    }


def _coefficients(config: Config) -> Config:
    """Terms large enough that leaving one out shows."""
    config.algo.entropy_coef, config.algo.kl_coef, config.rollout.temperature = 0.1, 0.2, 0.7
    return config


@pytest.fixture(scope="module")
def updated(ranks: RankPool, tiny_model: Path) -> list[dict[str, Any]]:
    config = _coefficients(jobs.make_config(tiny_model, tp=2))
    return ranks.run(jobs.update, 2, config=config, rows=jobs.make_rows())


def test_log_probs_and_entropy_are_those_of_transformers(updated: list[dict[str, Any]], tiny_model: Path) -> None:
    with torch.no_grad():
        expected = _plain_log_probs(_load(tiny_model), jobs.make_rows(), temperature=0.7)
    for mine, plain in zip(jobs.spoken(updated, "before"), expected, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)


def test_a_ppo_update_is_that_of_plain_torch(updated: list[dict[str, Any]], tiny_model: Path) -> None:
    model = _load(tiny_model)
    config = _coefficients(jobs.make_config(tiny_model))
    expected = _plain_update(model, config, jobs.make_rows())
    metrics = updated[0]["metrics"]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    plain = dict(model.named_parameters())
    for name, weight in updated[0]["weights"].items():
        torch.testing.assert_close(weight, plain[name].detach(), atol=2e-4, rtol=1e-4, msg=name)


def test_supervised_steps_are_those_of_plain_torch(ranks: RankPool, tiny_model: Path) -> None:
    config = jobs.make_config(tiny_model, tp=2)
    config.sft.lr, config.sft.warmup_steps, config.sft.steps = 1e-2, 0, 10**9  # the cosine has not begun to fall
    rows = _weighted_rows()
    results = ranks.run(jobs.supervised, 2, config=config, rows=rows, steps=2)

    model = _load(tiny_model)
    optimizer = _plain_optimizer(model, config, config.sft.lr)
    for step in range(2):
        total, weight_sum = torch.zeros(()), 0.0
        for row in range(len(rows)):
            logits, targets = _row_logits(model, rows, row)
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


@pytest.mark.parametrize(("micro_batch_rows", "pp"), [(1, 1), (5, 1), (12, 1), (5, 2)])
def test_the_cut_into_micro_batches_changes_nothing(
    ranks: RankPool, tiny_model: Path, updated: list[dict[str, Any]], micro_batch_rows: int, pp: int
) -> None:
    config = _coefficients(
        jobs.make_config(tiny_model, pp=pp, micro_batch_rows=micro_batch_rows, log_prob_micro_batch_rows=7)
    )
    other = ranks.run(jobs.update, pp, config=config, rows=jobs.make_rows())
    assert other[0]["metrics"] == pytest.approx(updated[0]["metrics"], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(jobs.spoken(other, "after")[0], jobs.spoken(updated, "after")[0], atol=1e-3, rtol=1e-3)


def test_padding_rows_weigh_nothing(ranks: RankPool, tiny_model: Path, updated: list[dict[str, Any]]) -> None:
    rows = jobs.make_rows()
    idle = rows.take([0, 1, 2, 3])
    idle = idle.with_columns(
        response_mask=idle["response_mask"].like(torch.zeros(idle["response_mask"].tokens)),
        advantages=idle["advantages"].like(torch.full((idle["advantages"].tokens,), 1e6)),
    )
    config = _coefficients(jobs.make_config(tiny_model, mini_batch_rows=16))
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
    config = _coefficients(jobs.make_config(tiny_model, dp=2, mini_batch_rows=24))
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
    from megagent.parallel.policy import TrainingDivergedError

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
