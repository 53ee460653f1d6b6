"""Layouts of clusters, on models that have the layers, heads and experts of large ones and tensors of a few numbers.

Number, order and neighbourhood of the copies are those of the large model; only their sizes are not.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard import hold, megatron, vllm
from megagent.parallel.reshard.plan import BYTES, make_plan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import REAL
from tests.parallel.reshard.arrays import ROOM, assert_equal, empty, numbered, scattered


def shrunken(name: str, **changes: Any) -> Architecture:
    """A published model with heads of one number, and the fewest columns that 16 ranks can split."""
    config = {**REAL[name], "head_dim": 1, "hidden_size": 3, "intermediate_size": 16, "vocab_size": 331}
    return architecture_of({**config, **changes})


def qwen2_72b() -> Architecture:
    return shrunken("Qwen/Qwen2.5-72B")


def qwen3_235b() -> Architecture:
    # A seventh of the layers, and as uneven on eight stages as 94 are.
    return shrunken("Qwen/Qwen3-235B-A22B", num_hidden_layers=14, moe_intermediate_size=16)


def deepseek_like() -> Architecture:
    """256 experts, the deepest of widths: a mixture of the size of DeepSeek-V3, whose attention this package lacks."""
    sizes = {"num_experts": 256, "num_attention_heads": 128, "num_key_value_heads": 16, "num_hidden_layers": 5}
    return shrunken("Qwen/Qwen3-235B-A22B", moe_intermediate_size=8, **sizes)


CASES = {
    "72B to tp8 pp2": (qwen2_72b(), Degrees(tp=8, pp=4, vpp=2), Workers(tp=8, pp=2)),
    "72B to more ranks than key/value heads": (qwen2_72b(), Degrees(tp=8, pp=4, dp=2), Workers(tp=16, engines=2)),
    "72B from more ranks than key/value heads": (qwen2_72b(), Degrees(tp=16, pp=2), Workers(tp=4, pp=4)),
    "235B to tp8 pp2": (qwen3_235b(), Degrees(tp=4, pp=8, ep=8, etp=1, dp=2), Workers(tp=8, pp=2)),
    "235B to whole experts": (
        qwen3_235b(),
        Degrees(tp=4, pp=8, ep=8, etp=1, dp=2),
        Workers(tp=16, expert_parallel=True),
    ),
    "256 experts to tp8 pp2": (deepseek_like(), Degrees(tp=2, pp=4, ep=16, etp=1, dp=8), Workers(tp=8, pp=2)),
    "256 experts to whole experts": (
        deepseek_like(),
        Degrees(tp=2, pp=2, ep=4, etp=2, dp=4),
        Workers(tp=16, pp=2, expert_parallel=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_worker_of_a_large_layout_gets_its_weights_and_each_byte_once(case: str) -> None:
    model, degrees, workers = CASES[case]
    source, target = megatron.layout(model, degrees), vllm.layout(model, workers)
    full = numbered(model.hf_shapes())
    held = empty(target)
    plan = make_plan(source, target)
    hold.execute(plan, scattered(source, full, padding=ROOM), held)
    assert_equal(held, scattered(target, full))
    least = sum(
        BYTES[tensor.dtype] * math.prod(box.shape)
        for tensors in target.tensors.values()
        for tensor in tensors
        for box in tensor.boxes
    )
    assert sum(plan.traffic.values()) == least
