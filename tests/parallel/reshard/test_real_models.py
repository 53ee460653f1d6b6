"""Published models on paper: every rank's share of each, built by Megatron without weights, against its layout.

A process group of one process that only says it has 64 ranks, and tensors without storage, take the place of a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from megagent.parallel.degrees import Degrees
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard import megatron
from tests.parallel import jobs
from tests.parallel.models.configs import REAL
from tests.parallel.pool import RankPool

# The builds take some twenty seconds, and all of them count as the first test's.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# As people train them, and some with uneven and interleaved stages.
LAYOUTS = [
    ("Qwen/Qwen2.5-1.5B", Degrees(tp=2, pp=2, vpp=2)),
    ("Qwen/Qwen2.5-7B", Degrees(tp=4, pp=2)),
    ("Qwen/Qwen2.5-7B", Degrees(pp=5)),
    ("Qwen/Qwen2.5-72B", Degrees(tp=8, pp=4, vpp=2)),
    ("meta-llama/Llama-3.1-8B", Degrees(tp=2, pp=2)),
    ("meta-llama/Llama-3.1-70B", Degrees(tp=8, pp=4, count_embedding=True, count_output=True)),
    ("mistralai/Mistral-7B-v0.3", Degrees(tp=4, pp=3, vpp=2)),
    ("Qwen/Qwen3-32B", Degrees(tp=8, pp=2)),
    ("Qwen/Qwen3-235B-A22B", Degrees(tp=4, pp=8, ep=8, etp=1, dp=2, sequence_parallel=True)),
    ("mistralai/Mixtral-8x7B-v0.1", Degrees(tp=2, pp=4, ep=4, dp=2, etp=1, sequence_parallel=True)),
]


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """What the platform makes has shapes and no storage."""
    import torch

    from megagent.parallel import platform

    here = platform._installed
    platform._installed = dataclasses.replace(platform.current(), device=torch.device("meta"))
    try:
        with torch.device("meta"):
            yield
    finally:
        platform._installed = here


def shapes_on_ranks(start: jobs.Start, layouts: list[tuple[str, Degrees]]) -> list[list[dict[str, Any]]]:
    """A job: of each layout and each rank, the canonical names and shapes of the parameters that Megatron makes."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megagent.parallel import hf_io, model

    del start
    found = []
    for name, degrees in layouts:
        architecture = architecture_of(REAL[name])
        ranks = []
        for place in degrees.places():
            dist.init_process_group("fake", store=FakeStore(), rank=place.rank, world_size=degrees.world)
            try:
                parallel_state.initialize_model_parallel(
                    degrees.tp,
                    degrees.pp,
                    virtual_pipeline_model_parallel_size=degrees.vpp if degrees.vpp > 1 else None,
                    expert_model_parallel_size=degrees.ep,
                    expert_tensor_parallel_size=degrees.expert_tp,
                    create_gloo_process_groups=False,
                )
                seen = (
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_data_parallel_rank(),
                    parallel_state.get_expert_model_parallel_rank(),
                    parallel_state.get_expert_tensor_parallel_rank(),
                )
                assert seen == (place.tp_rank, place.pp_rank, place.dp_rank, place.ep_rank, place.etp_rank)
                tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
                transformer = model.transformer_config(architecture, degrees, torch.bfloat16)
                transformer.use_cpu_initialization = True  # with this set Megatron leaves the device to torch
                with weightless():
                    chunks = model.build_chunks(transformer, architecture, degrees, place)
                # Raises if any name or shape differs from the table.
                parameters = hf_io.named_parameters(chunks, architecture, degrees, place)
                assert all(parameter.is_meta for parameter in parameters.values())
                ranks.append({name: tuple(parameter.shape) for name, parameter in parameters.items()})
            finally:
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()
        found.append(ranks)
    return found


@pytest.fixture(scope="module")
def made(ranks: RankPool) -> list[list[dict[str, Any]]]:
    return ranks.run(shapes_on_ranks, 1, seconds=800, layouts=LAYOUTS)[0]


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[f"{name}-{degrees.world}" for name, degrees in LAYOUTS])
def test_every_rank_of_a_real_model_holds_what_its_layout_says(number: int, made: list[list[dict[str, Any]]]) -> None:
    name, degrees = LAYOUTS[number]
    architecture = architecture_of(REAL[name])
    layout = megatron.layout(architecture, degrees)
    for rank, tensors in layout.tensors.items():
        assert made[number][rank] == {tensor.name: tensor.shape for tensor in tensors}
    # None missing, none twice: the layout's own check, now that the layout is known to be Megatron's.
    layout.check(architecture.hf_shapes())
