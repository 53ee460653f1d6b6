"""Senders in real Megatron ranks: the weights that training works with are those that receivers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagent.batch import StepBatch
from megagent.config import Config
from megagent.errors import InfrastructureError, MegagentError
from megagent.model_source import hf_config_of
from megagent.parallel.degrees import degrees_of
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard import vllm
from megagent.parallel.reshard.spec import Device, SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import receiver_end
from megagent.parallel.reshard.vllm import Workers
from tests.parallel import jobs
from tests.parallel.pool import RankPool

LAYOUT = {"tp": 2, "pp": 2, "vpp": 2}
WORKERS = Workers(tp=2)


def terms(config: Config, source_dtype: str = "F32") -> SyncSpec:
    degrees = degrees_of(config.parallel)
    node = Device("here")
    return SyncSpec(degrees, WORKERS, source_dtype, "F32", (node,) * degrees.world, (node,) * WORKERS.tp)


def train_and_sync(start: Any, config: Config, rows: StepBatch, syncs: bool) -> dict[str, Any]:
    """A job: an update, a sync after it that every rank also plays a worker in, and another update."""
    import torch.distributed as dist

    rank = start(config)
    found: dict[str, Any] = {}
    spec = terms(config)
    plan = make_sync_plan(spec, rank.policy.stage.architecture)
    worker = rank.rank % WORKERS.tp
    end = receiver_end("shared_memory", plan, worker, torch.device("cpu"))

    def offers(version: int) -> dict[int, Any]:
        all_offers: list[Any] = [None] * config.parallel.world
        dist.all_gather_object(all_offers, rank.offer_weights(version))
        return dict(enumerate(all_offers))

    if syncs:
        found["digest"] = rank.open_sync(spec.as_json(), "shared_memory") == plan.digest
        offers(1)
    rank.update(jobs.replica_part(rank, rows))
    found["weights"] = jobs.weights_of(rank)
    if syncs:
        end.open(offers(2), 2)
        held = {tensor.name: torch.zeros(tensor.shape) for tensor in plan.plan.target.tensors[worker]}
        for copies in plan.rounds:
            own = [copy for copy in copies if copy.target_rank == worker]
            end.fetch(own, lambda copy: held[copy.target][copy.target_slices])
        end.finish()
        found["received"] = worker, held
        dist.barrier()
    rank.update(jobs.replica_part(rank, rows))
    if syncs:
        found["noticed"] = _raised(InfrastructureError, end.finish)
        found["twice"] = _raised(MegagentError, rank.offer_weights, 2)
    found["after"] = jobs.weights_of(rank)
    return found


def _raised(kind: type[Exception], call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True])
def test_receivers_read_the_weights_that_were_trained_and_training_does_not_notice(
    ranks: RankPool, tiny_model: Path, distributed: bool
) -> None:
    config = jobs.laid_out(tiny_model, LAYOUT if not distributed else {"tp": 2, "dp": 2})
    config.parallel.distributed_optimizer = distributed
    rows = jobs.make_rows()
    alone = ranks.run(train_and_sync, 4, config=config, rows=rows, syncs=False)
    found = ranks.run(train_and_sync, 4, config=config, rows=rows, syncs=True)
    for name, weight in alone[0]["after"].items():  # parameters moved, and the optimizer moved with them
        assert torch.equal(found[0]["after"][name], weight), name
        assert torch.equal(found[0]["weights"][name], alone[0]["weights"][name]), name
    architecture = architecture_of(hf_config_of(str(tiny_model)))
    layout = vllm.layout(architecture, WORKERS, "F32")
    for result in found:
        assert result["digest"]
        worker, held = result["received"]
        for tensor in layout.tensors[worker]:
            expected = torch.zeros(tensor.shape)
            for box in tensor.boxes:
                expected[box.local_slices] = found[0]["weights"][box.hf][box.hf_slices]
            np.testing.assert_array_equal(held[tensor.name], expected, err_msg=f"{tensor.name} on worker {worker}")
        assert "changed version 2 of their weights while it was read" in result["noticed"]
        assert "version 2 is offered after version 2" in result["twice"]


def refusals(start: Any, config: Config) -> list[str]:
    rank = start(config)
    other = jobs.make_config(Path(config.model.path))
    return [
        _raised(MegagentError, rank.open_sync, terms(other).as_json(), "shared_memory"),
        _raised(MegagentError, rank.open_sync, terms(config, "BF16").as_json(), "shared_memory"),
        _raised(RuntimeError, rank.offer_weights, 1),
    ]


@pytest.mark.slow
def test_terms_that_are_not_the_ranks_own_are_refused(ranks: RankPool, tiny_model: Path) -> None:
    for degrees, dtype, unopened in ranks.run(refusals, 2, config=jobs.laid_out(tiny_model, {"tp": 2})):
        assert "its terms are for ranks of Degrees(tp=1" in degrees
        assert "is torch.float32" in dtype
        assert "BF16" in dtype
        assert unopened == "Rank.open_sync() must be called first"
