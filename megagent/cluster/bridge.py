"""Weight sync: the actor's weights become the engines' weights.

`WeightBridge` moves each element once, from the rank that holds it to the worker that needs it; `FileBridge` gathers
full tensors into a file, the slow plain way (rollout.sync=gather). Both number the versions, and both leave the
engines serving weights of one version, or unusable.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import ray

from megagent.cluster.calls import wait_all
from megagent.cluster.engines import EngineGroup
from megagent.cluster.placement import Placement
from megagent.cluster.ranks import RankGroup
from megagent.config import Config
from megagent.config_check import SYNCS
from megagent.errors import ConfigError, InfrastructureError
from megagent.model_source import hf_config_of
from megagent.parallel.degrees import degrees_of
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard import checksum
from megagent.parallel.reshard.spec import SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.vllm import Workers
from megagent.paths import expanded

DTYPES = {"fp32": "F32", "bf16": "BF16"}
SHOWN = 5  # tensors that an error lists


class Bridge(Protocol):
    version: int

    def sync(self, actor: RankGroup, rollout: EngineGroup) -> dict[str, float]:
        """Move the actor's weights; returns the version that the engines confirmed, bytes and seconds.

        Raises InfrastructureError if a rank or an engine failed, was late, or has other weights than were sent.
        """
        ...

    def close(self) -> None: ...


def open_bridge(config: Config, platform: str, placement: Placement, actor: RankGroup, rollout: EngineGroup) -> Bridge:
    """The way that rollout.sync names, agreed upon with all ranks and engines. platform: cpu or cuda, as resolved.

    Raises ConfigError for one that does not reach from the ranks to the engines.
    """
    if config.rollout.sync == "gather":
        return FileBridge(config.rollout.sync_dir)
    sources, targets = placement.devices(actor.nodes(), rollout.nodes())
    spec = SyncSpec(
        degrees=degrees_of(config.parallel),
        workers=Workers(tp=config.rollout.tp, engines=config.rollout.engines),
        source_dtype=DTYPES[config.model.dtype],
        target_dtype=DTYPES[config.model.dtype],
        timeout_s=config.cluster.timeout_s,
        sources=sources,
        targets=targets,
    )
    plan = make_sync_plan(spec, architecture_of(hf_config_of(config.model.path)))
    transport = choose_transport(config.rollout.sync, platform, plan, config.rollout.placement)
    return WeightBridge(plan, transport, config.rollout.sync_checksums, config.cluster.timeout_s, actor, rollout)


def choose_transport(sync: str, platform: str, plan: SyncPlan, placement: str) -> str:
    """The transport of rollout.sync. For auto, memory is read where it lies if each worker's own node holds all that it
    needs (on CUDA: on GPUs that both share); else peers send, by Gloo where NCCL would have two processes on a GPU.

    Raises ConfigError for a transport that does not serve the platform or the places of ranks and workers.
    """
    pairs = {(copy.source_rank, copy.target_rank) for copy in plan.plan.copies}
    far = sorted(pair for pair in pairs if plan.spec.distance(*pair) > 1)
    own_gpus = platform == "cuda" and placement == "disaggregated"
    peers = "nccl" if own_gpus else "gloo"
    if sync == "auto":
        mapped = "cuda_ipc" if platform == "cuda" else "shared_memory"
        return peers if far or own_gpus else mapped
    platforms, at_node = SYNCS[sync]
    problem = None
    if platform not in platforms:
        problem = f"is not for {platform}, on which this run is; use auto"
    elif sync == "nccl" and not own_gpus:
        problem = "has one process on a GPU, and ranks and engines share each; use auto"
    elif at_node and far:
        source, target = far[0]
        problem = (
            f"reads memory of its own node, and worker {target} needs weights of rank {source} on another "
            f"({len(far)} such pairs); use auto or {peers}"
        )
    if problem is not None:
        raise ConfigError([f"rollout.sync={sync}: {problem}"])
    return sync


class WeightBridge:
    """Shards go from the ranks to the workers that need them; every party has made the same plan for itself."""

    def __init__(
        self,
        plan: SyncPlan,
        transport: str,
        checksums: bool,
        timeout_s: float,
        actor: RankGroup,
        rollout: EngineGroup,
    ) -> None:
        """checksums: compare one of every tensor after each sync; timeout_s: deadline of each part of a sync.

        Raises MegagentError if a rank or a worker has made another plan, or holds a model that the plan is not of.
        """
        self.plan, self.transport, self.checksums, self.timeout_s = plan, transport, checksums, timeout_s
        self.version = 0
        self.failure: str | None = None
        self._minimum = sum(plan.plan.traffic.values())
        rendezvous = None if SYNCS[transport][1] else actor.meeting_point()
        terms = {
            "spec": plan.spec.as_json(),
            "transport": transport,
            "digest": plan.digest,
            "rendezvous": None if rendezvous is None else list(rendezvous),
        }
        # All at once: where ranks and workers are peers, none is done before the others have come.
        ranks = actor.calls("open_sync", terms["spec"], transport, rendezvous)
        engines = rollout.open_sync(terms)
        answers = self._wait({**ranks, **engines}, "agreeing on the weight sync")
        others = [name for name in ranks if answers[name] != plan.digest]
        if others:
            raise InfrastructureError(
                f"{', '.join(others)} plan the weight sync otherwise than the driver; install the same version of "
                "megagent on every node."
            )

    def sync(self, actor: RankGroup, rollout: EngineGroup) -> dict[str, float]:
        """See Bridge. A failed sync is the last one: its engines are unusable."""
        if self.failure is not None:
            raise InfrastructureError(f"an earlier weight sync failed: {self.failure}")
        version = self.version + 1
        seconds: dict[str, float] = {}
        try:
            with _timed(seconds, "prepare"):
                self._wait(rollout.calls("prepare", version), "making room for new weights")
            with _timed(seconds, "offer"):
                calls = actor.calls("offer_weights", version)
                offers = list(self._wait(calls, "offering weights").values())
            with _timed(seconds, "receive"):
                update = {"version": version, "offers": dict(enumerate(offers)), "checksums": self.checksums}
                sends, receives = actor.calls("send_weights", version), rollout.calls("receive", update)
                answers = self._wait({**sends, **receives}, "moving weights")
            reports = [report for name in receives for report in answers[name]]
            self._check(version, reports, actor)
            with _timed(seconds, "serve"):
                self._wait(rollout.calls("serve"), "serving new weights")
        except Exception as error:
            self.failure = str(error)
            # Those that are still in it would wait for the others until their deadlines.
            rollout.calls("abandon", f"the sync to weights version {version} failed elsewhere")
            raise InfrastructureError(
                f"the weight sync to version {version} failed, and the engines are unusable: {error}\n"
                "  Start the run again with trainer.resume=true."
            ) from error
        self.version = version
        return {
            "sync/version": version,
            "sync/bytes": sum(report["bytes"] for report in reports),
            "sync/bytes_minimum": self._minimum,
            **{f"timing_s/sync_{name}": value for name, value in seconds.items()},
            # Of the slowest worker: until all its shards had come, and for what its kernels need made of them.
            "timing_s/sync_transfer": max(report["receive_s"] for report in reports),
            "timing_s/sync_apply": max(report["apply_s"] for report in reports),
            "timing_s/sync": sum(seconds.values()),
        }

    def _check(self, version: int, reports: Sequence[Mapping[str, Any]], actor: RankGroup) -> None:
        """Raises InfrastructureError unless every worker holds this version and, if asked for, what was sent."""
        if any(report["version"] != version for report in reports):
            found = [report["version"] for report in reports]
            raise InfrastructureError(f"the workers hold weights of versions {found} instead of {version}")
        if not self.checksums:
            return
        sent = self._wait(actor.calls("weight_checksums"), "checksums of the weights").values()
        received = {worker: report["checksums"] for worker, report in enumerate(reports)}
        if wrong := checksum.differences(checksum.merge(sent), received):
            more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise InfrastructureError(f"checksums differ of {', '.join(wrong[:SHOWN])}{more}")

    def _wait(self, calls: Mapping[str, ray.ObjectRef], doing: str) -> dict[str, Any]:
        return wait_all(calls, doing, self.timeout_s)

    def close(self) -> None:
        """Nothing is left behind: shared memory and groups end with the processes."""


class FileBridge:
    """Rank 0 gathers full Hugging Face tensors into one safetensors file under rollout.sync_dir, which every worker
    maps (/dev/shm: shared memory of one node)."""

    def __init__(self, sync_dir: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="megagent-weights-", dir=expanded(sync_dir).resolve()))
        self.version = 0

    def sync(self, actor: RankGroup, rollout: EngineGroup) -> dict[str, float]:
        """See Bridge."""
        start = time.monotonic()
        version = self.version + 1
        path = self.folder / f"weights-{version}.safetensors"
        try:
            actor.publish_weights(path, version)
            size = path.stat().st_size
            confirmed = rollout.receive_weights(path, version)
        finally:
            path.unlink(missing_ok=True)
        if set(confirmed) != {version}:
            raise InfrastructureError(
                f"weight sync: the engines report versions {confirmed} after version {version} was sent. "
                "Start the run again with trainer.resume=true."
            )
        self.version = version
        return {"sync/version": version, "sync/bytes": size, "timing_s/sync": time.monotonic() - start}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[name] = time.monotonic() - start
