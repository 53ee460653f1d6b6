"""The interface of a transport: one end at a Megatron rank, one at a vLLM worker.

Mapped transports (shared memory, CUDA IPC): the sender offers its tensors where they lie, and the receiver reads them.
Peer transports (Gloo, NCCL): both walk through the rounds of the plan, in the same order, and send and receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megagent.parallel.reshard.plan import Copy

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Destination = Callable[[Copy], Tensor]  # where a copy's elements go: a view of the target's tensor, of its shape


class SenderEnd(Protocol):
    """Of one Megatron rank. `tensors`: its parameters by canonical name, given at construction."""

    def offer(self, version: int) -> dict[str, Any]:
        """What the receivers need in order to read this version, as JSON. Fast, and nothing is copied."""
        ...

    def send(self, version: int) -> int:
        """Serve all receivers; returns the bytes sent, 0 where receivers read by themselves. Raises
        InfrastructureError if a receiver is gone or late."""
        ...

    def withdraw(self) -> None:
        """The offered version is about to change: a receiver that still reads it finds out."""
        ...

    def close(self) -> None: ...


class ReceiverEnd(Protocol):
    """Of one vLLM worker."""

    def open(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> None:
        """offers: of each source rank. Raises InfrastructureError if one is not of this version."""
        ...

    def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
        """Bring one round's copies to this worker, cast to the destination's dtype; returns bytes moved.

        Rounds are fetched in the plan's order, those that have copies to this worker. Destinations of the round that
        follows may be asked for too: what comes for it lands there from now on."""
        ...

    def finish(self) -> None:
        """All rounds have been fetched. Raises InfrastructureError if what was read may not be one version."""
        ...

    def close(self) -> None: ...
