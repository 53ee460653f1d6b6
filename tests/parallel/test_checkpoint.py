"""Checkpoints: a resumed run is the run that was not interrupted, and nothing half-written is ever `latest`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megagent.batch import StepBatch
from megagent.config import Config
from tests.parallel import jobs
from tests.parallel.pool import JobFailed, RankPool

pytestmark = pytest.mark.slow


def interrupted_job(start: jobs.Start, config: Config, rows: StepBatch, folder: str) -> dict[str, Any]:
    """Three updates with a checkpoint after the second, then a new rank that resumes and does the third again."""
    rank = start(config)
    initial = jobs.log_probs_of(rank, rows)
    for _ in range(2):
        rank.update(jobs.replica_part(rank, rows))
    rank.save(folder, 2)
    metrics = rank.update(jobs.replica_part(rank, rows))
    straight = [parameter.detach().clone() for parameter in rank.policy.stage.parameters()]

    rank = start(config)
    iteration = rank.load(folder)
    resumed_metrics = rank.update(jobs.replica_part(rank, rows))
    same = all(map(torch.equal, straight, rank.policy.stage.parameters()))
    reference = jobs.log_probs_of(rank, rows, "reference")
    return {
        "iteration": iteration,
        "same_weights": same,
        "same_metrics": metrics == resumed_metrics,
        "same_reference": reference is None or initial is None or torch.equal(reference[0], initial[0]),
    }


def resumed_job(start: jobs.Start, config: Config, rows: StepBatch, folder: str) -> dict[str, Any]:
    rank = start(config)
    rank.load(folder)
    metrics = rank.update(jobs.replica_part(rank, rows))
    return {"metrics": metrics, "weights": jobs.weights_of(rank)}


def saved_job(start: jobs.Start, config: Config, folder: str, iterations: list[int]) -> None:
    rank = start(config)
    for iteration in iterations:
        rank.save(folder, iteration)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    ranks: RankPool, tiny_model: Path, tmp_path: Path, tp: int, pp: int, dp: int
) -> None:
    # Several mini-batches: that the order of rows goes on where it was shows too.
    config = jobs.make_config(tiny_model, tp, pp, dp, mini_batch_rows=4, lr_warmup_iterations=20)
    results = ranks.run(interrupted_job, tp * pp * dp, config=config, rows=jobs.make_rows(), folder=str(tmp_path))
    for result in results:
        assert result == {"iteration": 2, "same_weights": True, "same_metrics": True, "same_reference": True}


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (1, 2, 2)])
def test_a_checkpoint_can_be_resumed_on_another_topology(
    ranks: RankPool, tiny_model: Path, tmp_path: Path, tp: int, pp: int, dp: int
) -> None:
    rows = jobs.make_rows()
    source = jobs.make_config(tiny_model, tp=2)
    ranks.run(interrupted_job, 2, config=source, rows=rows, folder=str(tmp_path))
    expected = ranks.run(resumed_job, 2, config=source, rows=rows, folder=str(tmp_path))[0]
    config = jobs.make_config(tiny_model, tp, pp, dp)
    resumed = ranks.run(resumed_job, tp * pp * dp, config=config, rows=rows, folder=str(tmp_path))[0]
    assert resumed["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, abs=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, atol=1e-4, rtol=1e-3, msg=name)


def test_latest_names_the_newest_and_nothing_partial_stays(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    ranks.run(saved_job, 1, config=jobs.make_config(tiny_model), folder=str(tmp_path), iterations=[1, 2, 2])
    assert (tmp_path / "latest").read_text().strip() == "iteration_0000002"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_0000001", "iteration_0000002", "latest"]


def test_loading_from_a_folder_without_a_checkpoint_says_so(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="there is no checkpoint"):
        ranks.run(resumed_job, 1, config=jobs.make_config(tiny_model), rows=jobs.make_rows(), folder=str(tmp_path))


def test_a_damaged_checkpoint_is_refused_by_name(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    ranks.run(saved_job, 1, config=jobs.make_config(tiny_model), folder=str(tmp_path), iterations=[3])
    for file in (tmp_path / "iteration_0000003").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(JobFailed, match="iteration_0000003 cannot be loaded"):
        ranks.run(resumed_job, 1, config=jobs.make_config(tiny_model), rows=jobs.make_rows(), folder=str(tmp_path))
