"""Every policy loss and aggregation on ranks: however the rows are dealt out, gradients and metrics are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagent.algos.adjust import align
from megagent.batch import StepBatch
from megagent.config import Config
from tests.parallel import jobs
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow

FORMS = [
    (loss, aggregation)
    for loss in ("ppo", "gspo", "cispo")
    for aggregation in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
]


class Recorder:
    """Stands in for the optimizer: keeps the gradients of a step and leaves the weights as they are."""

    lr = 0.0

    def __init__(self, rank: Any) -> None:
        self.named = dict(rank.policy.stage.chunks[0].named_parameters())
        self.gradients: dict[str, Tensor] = {}

    def step(self) -> float:
        self.gradients = {name: parameter.main_grad.clone() for name, parameter in self.named.items()}
        return float(torch.stack([gradient.square().sum() for gradient in self.gradients.values()]).sum().sqrt())

    def advance(self) -> None: ...


def gradients_job(
    start: jobs.Start, config: Config, rows: StepBatch
) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    """Metrics and gradients of one mini-batch for each of FORMS, all with the same weights."""
    rank = start(config)
    rank.policy.optimizer = recorder = Recorder(rank)
    results = []
    for loss, aggregation in FORMS:
        config.algo.loss, config.algo.aggregation = loss, aggregation
        results.append((rank.update(jobs.replica_part(rank, rows)), recorder.gradients))
    return results


@pytest.fixture(scope="module")
def dealt(ranks: RankPool, tiny_model: Path) -> tuple[Any, Any]:
    """One rank with all rows in one micro-batch; two replicas with padding rows and micro-batches of 3, by rank."""
    rows = jobs.make_rows()
    layout: jobs.Layout = {"distributed_optimizer": False}
    one = jobs.with_large_terms(jobs.laid_out(tiny_model, layout, mini_batch_rows=16, micro_batch_rows=16))
    two = jobs.with_large_terms(jobs.laid_out(tiny_model, layout | {"dp": 2}, mini_batch_rows=16, micro_batch_rows=3))
    expected = ranks.run(gradients_job, 1, config=one, rows=rows)[0]
    return expected, ranks.run(gradients_job, 2, config=two, rows=align(rows, 16))


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_micro_batches_replicas_and_padding_change_no_gradient(dealt: Any, form: tuple[str, str]) -> None:
    expected, replicas = dealt
    _, theirs = expected[FORMS.index(form)]
    whole = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in theirs.values()]))
    for results in replicas:
        _, mine = results[FORMS.index(form)]
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert torch.linalg.vector_norm(mine[name] - gradient) < 1e-6 * whole, name


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_micro_batches_replicas_and_padding_change_no_metric(dealt: Any, form: tuple[str, str]) -> None:
    expected, replicas = dealt
    # What is about the cut itself (schedule/*) is to change.
    metrics = {name: value for name, value in expected[FORMS.index(form)][0].items() if name.startswith("actor/")}
    assert metrics["actor/pg_clipfrac"] > 0
    for results in replicas:
        found = {name: results[FORMS.index(form)][0][name] for name in metrics}
        assert found == pytest.approx(metrics, rel=1e-6, abs=1e-6)


def test_the_forms_are_different_losses(dealt: Any) -> None:
    """Or the tests above would compare nothing."""
    expected, _ = dealt
    assert len({round(metrics["actor/grad_norm"], 4) for metrics, _ in expected}) == len(FORMS)
