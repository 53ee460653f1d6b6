"""A small part of the sweep of weight syncs (`python -m benchmarks.sync_sweep` runs all): real ranks, real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
from tests.parallel.jobs import Layout
from tests.parallel.pool import RankPool
from tests.parallel.reshard.sweep import Sweep

pytestmark = pytest.mark.slow

# Model -> Megatron layouts, on the four ranks of the tests, to one engine of two workers.
CASES: dict[str, list[Layout]] = {
    # A tied head and a copy of it on the last stage, biases, one key/value head for all, a padded vocabulary.
    "qwen2-tied-1kv": [{"tp": 4}, {"tp": 2, "pp": 2, "vpp": 2}],
    # Experts over tensor ranks, and over replicas of two stages.
    "qwen3_moe": [{"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, {"pp": 2, "dp": 2, "ep": 2}],
}


@pytest.mark.parametrize("model", CASES)
def test_after_a_sync_the_engine_computes_with_the_trainers_weights_bit_by_bit(
    model: str, ranks: RankPool, tmp_path: Path
) -> None:
    sweep = Sweep(model, tmp_path, engines=(2,))
    try:
        for layout in CASES[model]:
            sweep.check(ranks, layout)
    finally:
        sweep.close()
