"""Checkpoints: a resumed run is the run that was not interrupted, and nothing half-written is ever `latest`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megagent.batch import StepBatch
from megagent.config import Config
from megagent.errors import MegagentError
from tests.parallel import families, jobs
from tests.parallel.convert.folders import plant
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


@pytest.fixture(scope="module")
def odd_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, tied, whose tensors do not fill the optimizer's buckets, and one of experts."""
    dense = tmp_path_factory.mktemp("dense")
    jobs.write_tiny_model(dense, hidden_size=40, vocab_size=100)
    return {"dense": dense, "mixture": families.write_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe")}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", {}),
        # The tied embedding has a bucket of its own, which does not fill a whole number of the optimizer's units.
        ("dense", {"pp": 2, "vpp": 2}),
        ("dense", {"tp": 2, "pp": 2, "sequence_parallel": True}),
        ("dense", {"dp": 2}),
        ("dense", {"dp": 2, "distributed_optimizer": False}),
        ("mixture", {"pp": 2, "dp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    ranks: RankPool, odd_models: dict[str, Path], tmp_path: Path, model: str, layout: jobs.Layout
) -> None:
    # Several mini-batches: that the order of rows goes on where it was shows too.
    config = jobs.laid_out(odd_models[model], layout, mini_batch_rows=4, micro_batch_rows=2, lr_warmup_iterations=20)
    results = ranks.run(
        interrupted_job, jobs.ranks_of(layout), config=config, rows=jobs.make_rows(), folder=str(tmp_path)
    )
    for result in results:
        assert result == {"iteration": 2, "same_weights": True, "same_metrics": True, "same_reference": True}


def refused_job(start: jobs.Start, saved: Config, resumed: Config, folder: str) -> str:
    start(saved).save(folder, 1)
    try:
        start(resumed).load(folder)
    except MegagentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "saved", "resumed", "words"),
    [
        ("dense", {}, {"distributed_optimizer": False}, "parallel.distributed_optimizer was true and is false"),
        ("mixture", {"dp": 2, "ep": 2}, {"dp": 2}, "parallel.ep above 1 was true and is false"),
    ],
    ids=["optimizer", "experts"],
)
def test_what_a_checkpoint_depends_on_is_said(
    ranks: RankPool,
    odd_models: dict[str, Path],
    tmp_path: Path,
    model: str,
    saved: jobs.Layout,
    resumed: jobs.Layout,
    words: str,
) -> None:
    configs = {
        "saved": jobs.laid_out(odd_models[model], saved),
        "resumed": jobs.laid_out(odd_models[model], resumed),
    }
    for said in ranks.run(refused_job, jobs.ranks_of(saved), **configs, folder=str(tmp_path)):
        assert words in said


@pytest.mark.parametrize("layout", [{}, {"pp": 2, "vpp": 2, "dp": 2}], ids=str)
def test_a_checkpoint_can_be_resumed_on_another_topology(
    ranks: RankPool, odd_models: dict[str, Path], tmp_path: Path, layout: jobs.Layout
) -> None:
    rows = jobs.make_rows()
    source = jobs.make_config(odd_models["dense"], tp=2)
    ranks.run(interrupted_job, 2, config=source, rows=rows, folder=str(tmp_path))
    expected = ranks.run(resumed_job, 2, config=source, rows=rows, folder=str(tmp_path))[0]
    config = jobs.laid_out(odd_models["dense"], layout)
    resumed = ranks.run(resumed_job, jobs.ranks_of(layout), config=config, rows=rows, folder=str(tmp_path))[0]
    metrics = jobs.without_schedule(expected["metrics"])
    assert jobs.without_schedule(resumed["metrics"]) == pytest.approx(metrics, rel=1e-3, abs=1e-5)
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


def planted_job(start: jobs.Start, config: Config, folder: str, harm: Path) -> str:
    rank = start(config)
    rank.save(folder, 1)
    plant(Path(folder) / "iteration_0000001", harm)
    try:
        rank.load(folder)
    except MegagentError as error:
        return str(error)
    return ""


def test_what_a_checkpoint_holds_is_not_run(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    config, folder = jobs.make_config(tiny_model), tmp_path / "checkpoints"
    (said,) = ranks.run(planted_job, 1, config=config, folder=str(folder), harm=tmp_path / "owned")
    assert "cannot be loaded" in said
    assert not (tmp_path / "owned").exists()
