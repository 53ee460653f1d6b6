"""How weights travel from trainer ranks to rollout workers; one interface, four names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megagent.errors import MegagentError
from megagent.parallel.reshard.spec import SyncPlan
from megagent.parallel.reshard.transports.base import ReceiverEnd, SenderEnd
from megagent.parallel.reshard.transports.mapped import MappedReceiver, MappedSender
from megagent.parallel.reshard.transports.memory import CudaMemory, HostMemory, Memory
from megagent.parallel.reshard.transports.peers import Group, PeerReceiver, PeerSender

MAPPED = ("shared_memory", "cuda_ipc")  # the receiver reads the trainer's tensors where they lie; one node
PEERS = ("gloo", "nccl")  # both sides send and receive; any nodes
# Where weights lie that it can move. Gloo's messages lie in host memory, so it also serves GPUs: the way for those of
# several nodes that trainer and engines share, where NCCL cannot be.
DEVICES = {"shared_memory": ("cpu",), "cuda_ipc": ("cuda",), "gloo": ("cpu", "cuda"), "nccl": ("cuda",)}


def sender_end(
    transport: str, plan: SyncPlan, rank: int, tensors: Mapping[str, Tensor], rendezvous: Sequence[Any] | None = None
) -> SenderEnd:
    """Of a Megatron rank. tensors: those that the plan reads, contiguous, by canonical name; rendezvous: see Group.

    Raises MegagentError if this transport cannot carry the plan.
    """
    device = next((tensor.device for tensor in tensors.values()), torch.device(DEVICES.get(transport, ("cpu",))[0]))
    _check(transport, plan, plan.plan.sends(rank), device, rendezvous)
    if transport in MAPPED:
        return MappedSender(tensors, _memory(transport, device))
    return PeerSender(plan, rank, tensors, device, _group(transport, plan, rank, device, rendezvous))


def receiver_end(
    transport: str, plan: SyncPlan, worker: int, device: torch.device, rendezvous: Sequence[Any] | None = None
) -> ReceiverEnd:
    """Of a vLLM worker, whose weights lie on `device`. Raises MegagentError if this transport cannot carry the plan."""
    _check(transport, plan, plan.plan.receives(worker), device, rendezvous)
    if transport in MAPPED:
        return MappedReceiver(plan, worker, _memory(transport, device))
    number = len(plan.spec.sources) + worker
    return PeerReceiver(plan, worker, device, _group(transport, plan, number, device, rendezvous))


def _check(transport: str, plan: SyncPlan, copies: Any, device: torch.device, rendezvous: Sequence[Any] | None) -> None:
    if transport not in DEVICES:
        raise MegagentError(f"rollout.sync={transport}: there is no such transport; use one of {', '.join(DEVICES)}")
    problems = []
    if device.type not in DEVICES[transport]:
        problems.append(f"it moves weights on {' or '.join(DEVICES[transport])}, and these are on {device.type}")
    if transport in PEERS and rendezvous is None:
        problems.append("trainer and engines have to be told a rendezvous, [host, port]")
    spec = plan.spec
    if transport == "nccl" and (shared := set(spec.sources) & set(spec.targets)):
        problems.append(f"NCCL has one process on a GPU, and trainer and engines share {len(shared)}")
    if transport in MAPPED:
        pairs = {(copy.source_rank, copy.target_rank) for copy in copies}
        nodes = sorted({(spec.sources[one].node, spec.targets[other].node) for one, other in pairs})
        if apart := [f"{one} and {other}" for one, other in nodes if one != other]:
            problems.append(f"it reads within one node, and weights go between {', '.join(apart)}")
    if problems:
        others = [name for name in DEVICES if device.type in DEVICES[name] and name != transport]
        raise MegagentError(f"rollout.sync={transport}: {'; '.join(problems)}; or use {' or '.join(others)}")


def _memory(transport: str, device: torch.device) -> Memory:
    return CudaMemory(device) if transport == "cuda_ipc" else HostMemory()


def _group(
    transport: str, plan: SyncPlan, number: int, device: torch.device, rendezvous: Sequence[Any] | None
) -> Group:
    assert rendezvous is not None  # _check
    size = len(plan.spec.sources) + len(plan.spec.targets)
    if transport == "gloo":
        device = torch.device("cpu")
    carrier = device if transport == "nccl" else torch.device("cpu")
    return Group(transport, number, size, rendezvous, carrier, plan.spec.timeout_s)
