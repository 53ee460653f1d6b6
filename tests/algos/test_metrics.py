from __future__ import annotations

from collections.abc import Callable

import pytest

from megagent.algos.adjust import align
from megagent.algos.credit import credit
from megagent.algos.metrics import credit_metrics
from megagent.batch import StepBatch
from megagent.config import AlgoConfig


def test_padding_changes_no_figure(random_batch: Callable[..., StepBatch]) -> None:
    plain = credit_metrics(credit(random_batch(), AlgoConfig()))
    assert credit_metrics(credit(align(random_batch(), 64), AlgoConfig())) == pytest.approx(plain)


def test_figures_by_hand(scored_batch: Callable[..., StepBatch]) -> None:
    batch = scored_batch([10.0, 0.0, 0.0], ["task"] * 3, anchors=["home", "home", "item"], returns=[9.0, 1.0, 2.0])
    metrics = credit_metrics(batch.with_columns(advantages=batch["token_rewards"]))
    assert metrics["critic/rewards/max"] == 10.0
    assert metrics["critic/returns/mean"] == 4.0
    assert metrics["critic/advantages/min"] == 0.0
    assert metrics["step_group/size/mean"] == 1.5
    assert metrics["step_group/lone_ratio"] == pytest.approx(1 / 3)


def test_no_rows_give_no_figures(random_batch: Callable[..., StepBatch]) -> None:
    assert credit_metrics(random_batch().take([])) == {}
