"""The same model, rows and seed give the same training on every topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import jobs
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow

TOPOLOGIES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 4, 1)]


def _trained(ranks: RankPool, model: Path, tp: int, pp: int, dp: int) -> list[dict[str, Any]]:
    config = jobs.make_config(model, tp, pp, dp)
    return ranks.run(jobs.update, tp * pp * dp, config=config, rows=jobs.make_rows())


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tiny_model: Path) -> list[dict[str, Any]]:
    return _trained(ranks, tiny_model, 1, 1, 1)


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=lambda sizes: "tp{}_pp{}_dp{}".format(*sizes))
def together(request: pytest.FixtureRequest, ranks: RankPool, tiny_model: Path) -> list[dict[str, Any]]:
    return _trained(ranks, tiny_model, *request.param)


def test_log_probs_and_entropy_do_not_depend_on_the_topology(
    alone: list[dict[str, Any]], together: list[dict[str, Any]]
) -> None:
    for mine, reference in zip(jobs.spoken(together, "before"), jobs.spoken(alone, "before"), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


def test_every_rank_reports_the_same_metrics(alone: list[dict[str, Any]], together: list[dict[str, Any]]) -> None:
    for result in together:
        assert result["metrics"] == pytest.approx(alone[0]["metrics"], rel=1e-4, abs=1e-6)


def test_an_update_leads_to_the_same_weights(alone: list[dict[str, Any]], together: list[dict[str, Any]]) -> None:
    # Adam's first step divides a gradient by its own size: where it is next to nothing, its rounding is what moves.
    for name, weight in alone[0]["weights"].items():
        torch.testing.assert_close(together[0]["weights"][name], weight, atol=2e-4, rtol=1e-4, msg=name)


def test_an_update_leads_to_the_same_log_probs(alone: list[dict[str, Any]], together: list[dict[str, Any]]) -> None:
    for mine, reference in zip(jobs.spoken(together, "after"), jobs.spoken(alone, "after"), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-3, rtol=1e-3)
