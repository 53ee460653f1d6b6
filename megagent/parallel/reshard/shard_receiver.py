"""The vLLM end of a weight sync from shard to shard, backend `megagent`.

In vLLM's own calls:
    init_weight_transfer_engine: {"spec": terms as SyncSpec.as_json says them, "engine": number of this engine,
        "transport": name, "digest": of the trainer's plan, "rendezvous": [host, port] where the transport needs one}
    update_weights: {"version": number, "offers": {source rank: what it offers}, "checksums": whether to sum}
The plan is made here again, from the terms and the model's config.json alone. A digest that differs, or a model that is
not what was planned, is refused before the first byte.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megagent.errors import MegagentError
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard import live
from megagent.parallel.reshard.apply import Incoming, InPlace, Repacked, Report, Target
from megagent.parallel.reshard.checksum import copy_checksum
from megagent.parallel.reshard.spec import SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import receiver_end
from megagent.parallel.reshard.transports.base import ReceiverEnd

MIXED = -1  # the version of a model with weights of several


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What both sides agree on once, see the module."""

    spec: dict[str, Any]
    engine: int
    transport: str
    digest: str
    rendezvous: list[Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """version: number of these weights; offers: by source rank; checksums: whether to sum what has been written."""

    version: int
    offers: dict[Any, dict[str, Any]]
    checksums: bool = False


class ShardReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes this worker's share of every tensor from the trainer ranks that hold it.

    A sync that fails on the way leaves layers of two versions behind, and `version` is MIXED then: the owner of the
    engine has to end it, or to sync it again, before it generates.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    version: int | None = None  # of the weights that were received last, None for those of the checkpoint, or MIXED
    report: Report | None = None  # of the last sync
    _end: ReceiverEnd | None = None
    _received: Report | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Raises MegagentError for terms that are not this engine's, a plan that is not the trainer's, and a model that
        is not what was planned."""
        try:
            spec = SyncSpec.from_json(init_info.spec)
        except (TypeError, KeyError) as error:
            raise MegagentError(
                f"the terms of the weight sync cannot be read ({error}); pass what SyncSpec.as_json says, of the same "
                "version of megagent."
            ) from error
        rank = self._rank(spec, init_info.engine)
        plan = make_sync_plan(spec, self._architecture())
        if plan.digest != init_info.digest:
            raise MegagentError(
                f"engine {init_info.engine} plans the weight sync otherwise than the trainer (digest "
                f"{plan.digest[:12]} instead of {init_info.digest[:12]}); give both the same model folder and the same "
                "version of megagent."
            )
        tensors = live.describe(self.model)
        live.compare(tensors, plan.plan.target.tensors[rank])
        self._target: Target = Repacked(tensors) if self.device.type == "cpu" else InPlace(tensors)
        self._incoming = Incoming(plan.rounds, rank, tensors)
        self.shutdown()
        self._end = receiver_end(init_info.transport, plan, rank, self.device, init_info.rendezvous)

    def start_weight_update(self) -> None:
        self._received = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes the accelerator here, which raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises MegagentError with nothing changed for a stale version, and what the transport raises."""
        if self._end is None:
            raise MegagentError("this engine has not been told of the trainer; call init_weight_transfer_engine first.")
        version = update_info.version
        if self.version is not None and version <= self.version:
            raise MegagentError(
                f"weights of version {version} are not newer than the engine's version {self.version}; "
                "count versions upwards, one for each sync."
            )
        start = time.perf_counter()
        self._end.open({int(rank): offer for rank, offer in update_info.offers.items()}, version)
        opening = time.perf_counter() - start
        self.version = MIXED
        self._received = self._incoming.receive(
            self._end, self._target, version, copy_checksum if update_info.checksums else None
        )
        self._received.receive_s += opening

    def finish_weight_update(self) -> None:
        if self._received is None:
            raise MegagentError("no weights came between the start and the end of a weight update.")
        self.version, self.report, self._received = self._received.version, self._received, None

    def shutdown(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def _architecture(self) -> Architecture:
        config = Path(self.model_config.model) / "config.json"
        if config.is_file():  # as the trainer reads it; transformers adds keys of its own
            return architecture_of(json.loads(config.read_text(encoding="utf-8")))
        return architecture_of(self.model_config.hf_config.to_dict())

    def _rank(self, spec: SyncSpec, engine: int) -> int:
        """The number of this worker among all workers of all engines."""
        parallel, workers = self.parallel_config, spec.workers
        found = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel)
        wanted = (workers.tp, workers.pp, workers.expert_parallel)
        if found != wanted:
            raise MegagentError(
                "this engine has (tensor, pipeline, expert parallel) = "
                f"{found}, and the trainer's terms say {wanted}; start the engine with those."
            )
        if parallel.data_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise MegagentError(
                f"this engine has data_parallel_size={parallel.data_parallel_size} and prefill_context_parallel_size="
                f"{parallel.prefill_context_parallel_size}; start one engine for each replica, with both 1."
            )
        if not 0 <= engine < workers.engines:
            raise MegagentError(f"this is engine {engine} of {workers.engines}; number engines from 0.")
        return (engine * workers.pp + get_pp_group().rank_in_group) * workers.tp + get_tp_group().rank_in_group
