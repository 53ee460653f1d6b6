"""Ranks and workers as real processes with weights on paper: no Megatron, no vLLM, only the ends of a weight sync."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from megagent.errors import InfrastructureError
from megagent.parallel.reshard import checksum
from megagent.parallel.reshard.plan import Copy
from megagent.parallel.reshard.sender import Sender
from megagent.parallel.reshard.spec import SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import receiver_end
from megagent.parallel.reshard.transports.base import DTYPES
from tests.parallel.models.configs import tiny
from tests.parallel.reshard.arrays import numbered, scattered

SECONDS = 120.0  # the deadline of every answer
TensorsOf = dict[str, torch.Tensor]


def sources(plan: SyncPlan, family: str, rank: int, change: float = 0.0) -> TensorsOf:
    """What a rank holds: numbers, another one in every element of the model, plus `change`."""
    shapes = tiny(family).hf_shapes()
    arrays = scattered(plan.plan.source, {name: array + change for name, array in numbered(shapes).items()})[rank]
    dtype = DTYPES[plan.spec.source_dtype]
    return {name: torch.from_numpy(array.astype(np.float32)).to(dtype) for name, array in arrays.items()}


def targets(plan: SyncPlan, rank: int) -> TensorsOf:
    return {
        tensor.name: torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype]) for tensor in plan.plan.target.tensors[rank]
    }


class RankEnd:
    def __init__(self, number: int, plan: SyncPlan, family: str, transport: str, rendezvous: Any) -> None:
        self.plan, self.family, self.number = plan, family, number
        self.tensors = sources(plan, family, number)
        self.sender = Sender(plan, number, self.tensors, transport, rendezvous)

    def change(self, change: float) -> None:
        for name, values in sources(self.plan, self.family, self.number, change).items():
            self.tensors[name].copy_(values)

    def offer(self, version: int) -> dict[str, Any]:
        return self.sender.offer(version)

    def send(self, version: int) -> int:
        return self.sender.send(version)

    def withdraw(self) -> None:
        self.sender.withdraw()

    def checksums(self) -> checksum.Checksums:
        return self.sender.checksums()

    def set_timeout(self, seconds: float) -> None:
        self.sender._end._group.timeout = timedelta(seconds=seconds)


class WorkerEnd:
    def __init__(self, number: int, plan: SyncPlan, family: str, transport: str, rendezvous: Any) -> None:
        self.number = number
        self.tensors = targets(plan, number)
        self.rounds = [[copy for copy in each if copy.target_rank == number] for each in plan.rounds]
        self.end = receiver_end(transport, plan, number, torch.device("cpu"), rendezvous)

    def open(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> None:
        self.end.open(offers, version)

    def read(self) -> tuple[int, checksum.Checksums, dict[str, Any]]:
        """Bytes moved, sums of what has been written, and what is held now."""
        sums: dict[str, int] = {}
        moved = 0
        for copies in self.rounds:
            moved += self.end.fetch(copies, self._destination)
            for copy in copies:
                checksum.add_checksum(sums, copy.target, checksum.copy_checksum(copy, self._destination(copy)))
        self.end.finish()
        return moved, {self.number: sums}, {name: held.float().numpy() for name, held in self.tensors.items()}

    def set_timeout(self, seconds: float) -> None:
        self.end._group.timeout = timedelta(seconds=seconds)

    def receive(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> Any:
        self.open(offers, version)
        return self.read()

    def _destination(self, copy: Copy) -> torch.Tensor:
        return self.tensors[copy.target][copy.target_slices]


class Processes:
    """One for each rank and each worker. A call is made on some of them at once, and each answers."""

    def __init__(self, spec: SyncSpec, family: str, transport: str, rendezvous: Any = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once
        self.ranks = [f"rank {number}" for number in range(len(spec.sources))]
        self.workers = [f"worker {number}" for number in range(len(spec.targets))]
        self._connections, self._processes = {}, {}
        for name in (*self.ranks, *self.workers):
            mine, theirs = context.Pipe()
            self._connections[name] = mine
            arguments = (theirs, name, spec.as_json(), family, transport, rendezvous)
            self._processes[name] = context.Process(target=_serve, args=arguments, daemon=True)
            self._processes[name].start()
            theirs.close()
        for name in (*self.ranks, *self.workers):
            self._answer(name)  # that it is ready

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def ask(self, names: Sequence[str], method: str, *arguments: Any) -> None:
        for name in names:
            self._connections[name].send((method, arguments))

    def answers(self, names: Sequence[str]) -> list[Any]:
        """By name in their order. Raises InfrastructureError with all that went wrong."""
        found, errors = [], []
        for name in names:
            try:
                found.append(self._answer(name))
            except InfrastructureError as error:
                errors.append(f"{name}: {error}")
        if errors:
            raise InfrastructureError("\n".join(errors))
        return found

    def call(self, names: Sequence[str], method: str, *arguments: Any) -> list[Any]:
        self.ask(names, method, *arguments)
        return self.answers(names)

    def sync(self, version: int) -> list[Any]:
        """What each worker answers to `receive`."""
        offers = dict(enumerate(self.call(self.ranks, "offer", version)))
        self.ask(self.ranks, "send", version)
        self.ask(self.workers, "receive", offers, version)
        received = self.answers(self.workers)
        self.sent = self.answers(self.ranks)
        return received

    def pause(self, name: str) -> None:
        os.kill(self._processes[name].pid, signal.SIGSTOP)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].join()

    def _answer(self, name: str) -> Any:
        connection = self._connections[name]
        if not connection.poll(SECONDS):
            raise AssertionError(f"{name} did not answer within {SECONDS:.0f} s")
        kind, value = connection.recv()
        if kind == "error":
            raise InfrastructureError(value)
        assert kind == "value", f"{name} raised\n{value}"
        return value


def _serve(connection: Any, name: str, terms: dict[str, Any], family: str, transport: str, rendezvous: Any) -> None:
    torch.set_num_threads(1)
    role, number = name.split()
    end: Any = None
    with contextlib.suppress(EOFError):
        while True:
            try:
                if end is None:
                    plan = make_sync_plan(SyncSpec.from_json(terms), tiny(family))
                    end = (RankEnd if role == "rank" else WorkerEnd)(int(number), plan, family, transport, rendezvous)
                    answer = None
                else:
                    method, arguments = connection.recv()
                    answer = getattr(end, method)(*arguments)
            except EOFError:
                raise
            except InfrastructureError as error:
                connection.send(("error", str(error)))
            except Exception:
                connection.send(("raised", traceback.format_exc()))
            else:
                connection.send(("value", answer))
