"""Trainer ranks without Megatron: processes that hold a folder's weights as ranks would, and can be made to fail."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megagent.model_source import hf_config_of
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard.sender import Sender
from megagent.parallel.reshard.spec import Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import peers
from megagent.parallel.reshard.vllm import Workers

SECONDS = 150.0  # the deadline of every answer: generous, the machine may be busy


class Trainers:
    """Ranks of tp=2 that send to one engine of `engine_tp` workers."""

    def __init__(self, folder: Path, engine_tp: int, transport: str, rendezvous: list[Any] | None = None) -> None:
        """folder: a Hugging Face folder in fp32, of the model that the engine has."""
        here = Device("here")
        spec = SyncSpec(
            degrees=Degrees(tp=2),
            workers=Workers(tp=engine_tp),
            source_dtype="F32",
            target_dtype="F32",
            sources=(here, here),
            targets=(here,) * engine_tp,
            buffer_bytes=16 << 10,  # many rounds, so that there is a middle
            timeout_s=SECONDS,
        )
        plan = make_sync_plan(spec, architecture_of(hf_config_of(str(folder))))
        self.terms = {
            "spec": spec.as_json(),
            "engine": 0,
            "transport": transport,
            "digest": plan.digest,
            "rendezvous": rendezvous,
        }
        context = multiprocessing.get_context("spawn")
        self.processes, self._connections = [], []
        for rank in range(2):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, str(folder), self.terms), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(mine)
        self.answers()  # that they are ready

    def ask(self, method: str, *arguments: Any) -> None:
        for connection in self._connections:
            connection.send((method, arguments))

    def answers(self) -> list[Any]:
        """Of each rank what it returned, or its error's text after "raised: "; None of one that died."""
        return [self._answer(connection) for connection in self._connections]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.ask(method, *arguments)
        return self.answers()

    def tell(self, rank: int, word: Any) -> None:
        """For a rank that waits in the middle of its messages."""
        self._connections[rank].send(word)

    def answer(self, rank: int) -> Any:
        return self._answer(self._connections[rank])

    def update(self, version: int, checksums: bool = False) -> dict[str, Any]:
        """What the engine is told of a version that the ranks offer."""
        offers = dict(enumerate(self.call("offer", version)))
        return {"version": version, "offers": offers, "checksums": checksums}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(SECONDS):
            raise AssertionError(f"a rank did not answer within {SECONDS:.0f} s")
        try:
            return connection.recv()
        except EOFError:
            return None


class _Rank:
    def __init__(self, connection: Connection, rank: int, folder: str, terms: Mapping[str, Any]) -> None:
        self._connection, self._rank, self._folder = connection, rank, folder
        self.plan = make_sync_plan(SyncSpec.from_json(terms["spec"]), architecture_of(hf_config_of(folder)))
        self.tensors = shards(self.plan, rank, Path(folder))
        self.sender = Sender(self.plan, rank, self.tensors, terms["transport"], terms["rendezvous"])

    def load(self, folder: str) -> None:
        """New weights in the same tensors, as an optimizer step makes them."""
        self.sender.withdraw()
        for name, tensor in shards(self.plan, self._rank, Path(folder)).items():
            self.tensors[name].copy_(tensor)

    def offer(self, version: int) -> dict[str, Any]:
        return self.sender.offer(version)

    def send(self, version: int) -> int:
        return self.sender.send(version)

    def checksums(self) -> dict[int, dict[str, int]]:
        return self.sender.checksums()

    def fail_after(self, rounds: int, how: str) -> None:
        """Rank 1 dies, or waits to be told to go on, when it has sent so many rounds of the next sync."""
        if self._rank == 0:
            return
        exchange, left = peers.Group.exchange, rounds + 2  # the first exchange is of versions and plans

        def exchange_and_fail(group: peers.Group, *messages: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and how == "die":
                os._exit(9)
            if left == 0:
                self._connection.send("waiting")
                self._connection.recv()
            return exchange(group, *messages)

        peers.Group.exchange = exchange_and_fail  # type: ignore[method-assign]


def shards(plan: SyncPlan, rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """What a rank holds of a folder's weights."""
    whole = load_file(folder / "model.safetensors")
    held = {tensor.name: torch.zeros(tensor.shape) for tensor in plan.plan.source.tensors[rank]}
    for tensor in plan.plan.source.tensors[rank]:
        for box in tensor.boxes:
            held[tensor.name][box.local_slices] = whole[box.hf][box.hf_slices]
    return held


def _rank(connection: Connection, rank: int, folder: str, terms: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    end = _Rank(connection, rank, folder, terms)
    connection.send("ready")
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(end, method)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = f"raised: {error}"
        connection.send(answer)
