"""A small part of the sweep of weight syncs (`python -m benchmarks.sync_sweep` runs all): real ranks, real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
from megagent.model_source import hf_config_of
from megagent.parallel.degrees import degrees_of, training_problems
from megagent.parallel.models import architecture_of
from tests.parallel import jobs
from tests.parallel.jobs import Layout
from tests.parallel.pool import RankPool
from tests.parallel.reshard.sweep import ENGINES, MODELS, Sweep, bytes_held, engines, layouts, plan_of

# Model -> Megatron layouts, on the four ranks of the tests, to one engine of two workers.
CASES: dict[str, list[Layout]] = {
    # A tied head and a copy of it on the last stage, biases, one key/value head for all, a padded vocabulary.
    "qwen2-tied-1kv": [{"tp": 4}, {"tp": 2, "pp": 2, "vpp": 2}],
    # Experts over tensor ranks, and over replicas of two stages.
    "qwen3_moe": [{"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, {"pp": 2, "dp": 2, "ep": 2}],
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_of_the_sweep_can_train_and_moves_each_byte_once(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    model.config.save_pretrained(tmp_path)
    architecture = architecture_of(hf_config_of(str(tmp_path)))
    for layout in layouts(model.mixes):
        config = jobs.laid_out(tmp_path, layout)
        degrees = degrees_of(config.parallel)
        assert architecture.problems(degrees) + training_problems(degrees, model.mixes) == []
        for engine in engines(model.mixes):
            made = plan_of(config, architecture, ENGINES[engine])
            assert sum(made.plan.traffic.values()) == sum(
                bytes_held(made, worker) for worker in made.plan.target.tensors
            )


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_after_a_sync_the_engine_computes_with_the_trainers_weights_bit_by_bit(
    model: str, ranks: RankPool, tmp_path: Path
) -> None:
    sweep = Sweep(model, "tp2", tmp_path)
    try:
        for layout in CASES[model]:
            sweep.check(ranks, layout)
    finally:
        sweep.close()
