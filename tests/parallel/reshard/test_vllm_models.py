"""vLLM's own models, as every worker of some layouts builds them, against the layout of their parameters: what it says
of their shapes; that the receiver, which reads the layers themselves, finds the same parts in them; and that what it
writes into them in place is what vLLM's own loader makes of a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from megagent.parallel.models import Architecture, hf_config_of
from megagent.parallel.reshard import vllm
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import tiny

# vLLM takes long to import, and all builds count as the first test's.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def model(family: str, tied: bool = False) -> Architecture:
    width = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 3, **width}
    return tiny(family, tie_word_embeddings=tied, **sizes)


CASES = [
    (model("qwen2", tied=True), Workers(tp=4)),  # more than key/value heads
    (model("qwen3"), Workers(pp=3)),
    (model("llama", tied=True), Workers(tp=2, pp=2)),
    (model("qwen3_moe"), Workers(tp=2, expert_parallel=True)),
    (model("mixtral"), Workers(tp=2, pp=2)),
    (model("mistral"), Workers(tp=2)),
]
IDS = [f"{model.family}-tp{each.tp}-pp{each.pp}" for model, each in CASES]


@pytest.fixture(scope="module")
def built() -> list[list[dict[str, Any]]]:
    cases = [[hf_config_of(model), each.tp, each.pp, each.expert_parallel] for model, each in CASES]
    command = [sys.executable, "-m", "tests.parallel.reshard.vllm_parameters"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_vllm_holds_on_every_worker_what_its_layout_says(number: int, built: list[list[dict[str, Any]]]) -> None:
    layout = vllm.layout(*CASES[number])
    for rank, tensors in layout.tensors.items():
        assert built[number][rank]["shapes"] == {tensor.name: list(tensor.shape) for tensor in tensors}


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_the_layers_of_every_worker_say_the_same_as_the_layout(number: int, built: list[list[dict[str, Any]]]) -> None:
    layout = vllm.layout(*CASES[number])
    for rank, tensors in layout.tensors.items():
        planned = json.loads(json.dumps([asdict(tensor) for tensor in tensors]))
        described = built[number][rank]["described"]
        assert sorted(described, key=itemgetter("name")) == sorted(planned, key=itemgetter("name"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_received_weights_are_those_that_vllm_loads_itself_and_stay_where_they_were(
    number: int, built: list[list[dict[str, Any]]]
) -> None:
    for rank, found in enumerate(built[number]):
        assert (rank, found["differs"], found["moved"]) == (rank, [], [])
