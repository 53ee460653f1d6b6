"""An update is the same on every layout of the ranks, and the same as in plain transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import families, jobs, plain
from tests.parallel.jobs import Layout
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow

# All there are of two ways each (virtual stages need stages, and sequence parallelism tensor parallelism), and a long
# pipeline.
DENSE: list[Layout] = [
    *(
        {"tp": tp, "sequence_parallel": sequence, "pp": pp, "vpp": vpp, "dp": dp, "distributed_optimizer": distributed}
        for tp, sequence in ((1, False), (2, False), (2, True))
        for pp, vpp in ((1, 1), (2, 1), (2, 2))
        for dp, distributed in itertools.product((1, 2), (False, True))
    ),
    {"pp": 4},
]
# Model -> number of ranks -> layouts.
LAYOUTS: dict[str, dict[int, list[Layout]]] = {
    "dense": {world: [layout for layout in DENSE if jobs.ranks_of(layout) == world] for world in (1, 2, 4, 8)},
    "mixture": {
        1: [{}],
        2: [
            {"tp": 2, "sequence_parallel": True},
            {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1},
            {"pp": 2, "vpp": 2},
            {"dp": 2, "ep": 2},
        ],
        4: [
            {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
            {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "distributed_optimizer": False},
            {"pp": 2, "dp": 2, "ep": 2},
        ],
    },
}
CASES = [(model, world) for model, layouts in LAYOUTS.items() for world in layouts]
# Two, for gradients that are left over show in the second only, and the reference is then another policy.
ITERATIONS = 2
# Adam divides each gradient by its own size: where it is next to nothing, its rounding moves a weight by up to lr in
# every step. The weights are around 0.15, and the four steps here move them by 8e-4 at most.
LR = 2e-4


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    return {"dense": tiny_model, "mixture": families.write_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe")}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def trained(
    request: pytest.FixtureRequest, ranks: RankPool, model_of: dict[str, Path]
) -> tuple[str, list[tuple[Layout, list[dict[str, Any]]]]]:
    """The model, and what every rank of each layout has to say."""
    model, world = request.param
    layouts = LAYOUTS[model][world]
    # In the second epoch the policy is no longer the one whose log-probs are the old ones.
    configs = [jobs.with_large_terms(jobs.laid_out(model_of[model], layout, lr=LR, epochs=2)) for layout in layouts]
    results = ranks.run(
        jobs.iterations,
        world,
        configs=configs,
        rows=jobs.make_episodes(),
        count=ITERATIONS,
        starts=len(layouts),
        seconds=900.0,
    )
    return model, [(layout, [result[number] for result in results]) for number, layout in enumerate(layouts)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, model_of: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The same in plain transformers."""
    return {name: _plainly(folder, tmp_path_factory.mktemp("plain")) for name, folder in model_of.items()}


def _plainly(folder: Path, out: Path) -> dict[str, Any]:
    model, rows = plain.load(folder), jobs.make_episodes()
    config = jobs.with_large_terms(jobs.make_config(folder, lr=LR, epochs=2))
    with torch.no_grad():
        before = plain.log_probs_of(model, rows, config.rollout.temperature)
    metrics = plain.iterate(model, plain.load(folder), config, rows, ITERATIONS)
    return {"before": before, "metrics": metrics, "weights": plain.weights_of(model, out)}


def test_log_probs_and_entropy_are_those_of_transformers(trained: Any, expected: dict[str, Any]) -> None:
    model, runs = trained
    for layout, results in runs:
        for mine, theirs in zip(jobs.spoken(results, "before"), expected[model]["before"], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5, msg=str(layout))


def test_every_rank_reports_the_metrics_of_plain_transformers(trained: Any, expected: dict[str, Any]) -> None:
    model, runs = trained
    theirs = expected[model]["metrics"]
    for layout, results in runs:
        for result in results:
            mine = {name: result["metrics"][name] for name in theirs}
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6), layout


def test_updates_lead_to_the_weights_of_plain_transformers(trained: Any, expected: dict[str, Any]) -> None:
    model, runs = trained
    for layout, results in runs:
        assert results[0]["weights"].keys() == expected[model]["weights"].keys()
        for name, theirs in expected[model]["weights"].items():
            difference = torch.linalg.vector_norm(results[0]["weights"][name] - theirs)
            assert difference < 1e-5 * torch.linalg.vector_norm(theirs), f"{layout}: {name}"
