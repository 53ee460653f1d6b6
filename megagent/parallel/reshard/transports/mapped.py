"""Mapped transports: the trainer's tensors are read where they lie. Shared memory and CUDA IPC differ in nothing else.

Nobody waits for anybody. Each sender shows in a word of shared memory which version its tensors are, or that they
change; a receiver looks before it reads and again after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megagent.errors import InfrastructureError
from megagent.parallel.reshard.plan import Copy
from megagent.parallel.reshard.spec import SyncPlan
from megagent.parallel.reshard.transports.base import DTYPES, Destination
from megagent.parallel.reshard.transports.memory import HostMemory, Memory

_CHANGING = -1


class MappedSender:
    """Offers a rank's tensors. Their storages are shared once; what lies elsewhere at a later offer is shared then."""

    def __init__(self, tensors: Mapping[str, Tensor], memory: Memory) -> None:
        """tensors: contiguous ones, those that the plan reads from."""
        self._tensors = tensors
        self._memory = memory
        self._shown = torch.full((1,), _CHANGING, dtype=torch.int64)
        self._control = HostMemory().share(self._shown.untyped_storage())
        self._share()  # what cannot be shared fails at the start, and no later sync waits for it

    def offer(self, version: int) -> dict[str, Any]:
        storages, tensors = self._share()
        self._memory.settle()
        self._shown.fill_(version)
        return {"version": version, "control": self._control, "storages": storages, "tensors": tensors}

    def send(self, version: int) -> int:
        return 0

    def withdraw(self) -> None:
        self._shown.fill_(_CHANGING)

    def close(self) -> None:
        self.withdraw()

    def _share(self) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
        """Handles of all storages, and of each tensor the number of its storage and its offset there in elements."""
        storages: list[dict[str, Any]] = []
        numbers: dict[int, int] = {}  # by address
        tensors: dict[str, list[int]] = {}
        for name, tensor in self._tensors.items():
            storage = tensor.untyped_storage()
            handle = self._memory.share(storage)  # may give it its address
            number = numbers.setdefault(storage.data_ptr(), len(storages))
            if number == len(storages):
                storages.append(handle)
            tensors[name] = [number, int(tensor.storage_offset())]
        return storages, tensors


class MappedReceiver:
    """Reads a worker's share from the tensors of the ranks that have it."""

    def __init__(self, plan: SyncPlan, worker: int, memory: Memory) -> None:
        read = {(copy.source_rank, copy.source) for copy in plan.plan.receives(worker)}
        self._shapes = {
            (rank, name): (tensor.shape, DTYPES[tensor.dtype])
            for rank, name in read
            for tensor in (plan.plan.source.tensor(rank, name),)
        }
        self._sources = sorted({rank for rank, _ in read})
        self._memory = memory
        self._opened: dict[str, Tensor] = {}  # handle -> its bytes
        self._controls: dict[int, Tensor] = {}
        self._tensors: dict[tuple[int, str], Tensor] = {}
        self._version = _CHANGING

    def open(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> None:
        problems = [
            f"rank {rank} offers {offers[rank]['version'] if rank in offers else 'nothing'}"
            for rank in self._sources
            if rank not in offers or offers[rank]["version"] != version
        ]
        if problems:
            raise InfrastructureError(f"weight sync of version {version} is not possible: {'; '.join(problems)}")
        before, self._opened = self._opened, {}
        self._version = version
        control = HostMemory()
        self._controls = {
            rank: self._once(offers[rank]["control"], before, control).view(torch.int64) for rank in self._sources
        }
        self._check("before it was read")
        self._tensors = {}
        for (rank, name), (shape, dtype) in self._shapes.items():
            try:
                number, offset = offers[rank]["tensors"][name]
            except KeyError:
                raise InfrastructureError(f"weight sync: rank {rank} does not offer {name}") from None
            storage = self._once(offers[rank]["storages"][number], before, self._memory)
            start, size = offset * dtype.itemsize, math.prod(shape) * dtype.itemsize
            if start + size > storage.numel():
                raise InfrastructureError(
                    f"weight sync: {name} of rank {rank} lies at bytes {start} to {start + size} of {storage.numel()}"
                )
            self._tensors[rank, name] = storage[start : start + size].view(dtype).view(shape)

    def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
        moved = 0
        for copy in copies:
            target = destination(copy)
            target.copy_(self._tensors[copy.source_rank, copy.source][copy.source_slices])
            moved += target.numel() * target.element_size()
        return moved

    def finish(self) -> None:
        self._memory.settle()
        self._check("while it was read")

    def close(self) -> None:
        self._opened, self._controls, self._tensors = {}, {}, {}

    def _once(self, handle: Mapping[str, Any], before: dict[str, Tensor], memory: Memory) -> Tensor:
        """Opened for this sync, now or in an earlier one; what is no longer offered is let go."""
        name = json.dumps(handle, sort_keys=True)
        if name not in self._opened:
            self._opened[name] = before[name] if name in before else memory.open(handle)
        return self._opened[name]

    def _check(self, when: str) -> None:
        shown = {rank: int(control[0]) for rank, control in self._controls.items()}
        if changed := [rank for rank, version in shown.items() if version != self._version]:
            raise InfrastructureError(
                f"weight sync: ranks {changed} changed version {self._version} of their weights {when}; train on only "
                "after the engines have confirmed a version"
            )
