"""Peer transports: trainer ranks and workers walk through the rounds of the plan and send each other packed buffers.

One process group of its own over all trainer ranks and, after them, all workers; Gloo and NCCL differ in how it is
made. What a rank sends another in one round travels as one message, cast to the target's dtype while it is packed. Two
rounds are under way at a time: one travels while the other is packed or unpacked.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagent.errors import InfrastructureError
from megagent.parallel.reshard.boxes import Shape
from megagent.parallel.reshard.plan import BYTES, Copy
from megagent.parallel.reshard.spec import SyncPlan
from megagent.parallel.reshard.transports.base import DTYPES, Destination

_UNDER_WAY = 2  # rounds
_HEADER_TAG = 0


class Group:
    """A process group beside torch's default one, joined at the first use. Every wait in it has a deadline.

    After a failure it is of no use to anybody: all later calls raise.
    """

    def __init__(
        self, backend: str, number: int, size: int, rendezvous: Sequence[Any], device: torch.device, timeout_s: float
    ) -> None:
        """number: of this process in the group; rendezvous: host and port where number 0 listens, from now on."""
        self.name = f"{backend} at {rendezvous[0]}:{rendezvous[1]}"
        self.backend, self.number, self.size, self.device = backend, number, size, device
        self.host, self.port = str(rendezvous[0]), int(rendezvous[1])
        self.timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._failed: str | None = None
        self._store = self._listen() if number == 0 else None

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int) -> list[dist.Work]:
        """Begin to send and to receive: number of the peer -> bytes. Messages of two tags do not meet."""
        with self._failing("could not be reached"):
            group = self._joined()
            if not sends and not receives:
                return []
            together = self.backend == "nccl"  # so that NCCL uses the one communicator that all have joined
            if together:
                group._start_coalescing()
            works = [group.send([buffer], peer, tag) for peer, buffer in sends.items()]
            works += [group.recv([buffer], peer, tag) for peer, buffer in receives.items()]
            return [group._end_coalescing()] if together else works

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Until all is sent and received. Raises InfrastructureError if a peer is gone or late."""
        with self._failing("is gone, or was late"):
            for work in works:
                work.wait(self.timeout)

    def fail(self, why: str) -> InfrastructureError:
        """The error to raise; everybody else is told by the end of the connections."""
        if self._failed is None:
            self._failed = why
            self.close()
        return InfrastructureError(f"weight sync over {self.name}: {self._failed}")

    def close(self) -> None:
        group, self._group = self._group, None
        self._store = None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        if self._failed is not None:
            raise self.fail("")
        try:
            yield
        except (RuntimeError, ValueError) as error:  # ValueError: of an address that is none
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self.fail(f"a peer {what} within {self.timeout.total_seconds():.0f} s ({reason})") from error

    def _joined(self) -> Any:
        if self._group is None:
            store = dist.PrefixStore("megagent", self._store or self._listen())
            self._group = _make_group(self.backend, store, self.number, self.size, self.host, self.port, self.timeout)
            # Everybody is there, or nobody goes on; and NCCL makes its communicator, which all have to take part in.
            self._group.allreduce([torch.zeros(1, device=self.device)]).wait(self.timeout)
        return self._group

    def _listen(self) -> dist.TCPStore:
        try:
            return dist.TCPStore(
                self.host, self.port, None, self.number == 0, timeout=self.timeout, wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise self.fail(f"{str(error).splitlines()[0]}; use a host and a port that are free") from error


def _make_group(
    backend: str, store: dist.Store, number: int, size: int, host: str, port: int, timeout: timedelta
) -> Any:
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, number, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # By itself Gloo asks the resolver for this node's own name, which need not be an address that others reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, port), lazy_init=False)]
    return dist.ProcessGroupGloo(store, number, size, options)


def _own_address(host: str, port: int) -> str:
    """The address of this node that traffic to the host leaves from. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@dataclass(frozen=True)
class _Message:
    """What goes from one rank to another in one round."""

    copies: tuple[Copy, ...]
    bytes: int


@dataclass(frozen=True)
class _Round:
    """One end's part of a round. number: also the tag, from 1; messages: by the rank of the peer."""

    number: int
    copies: tuple[Copy, ...]
    messages: Mapping[int, _Message]


class _Messages:
    """One end's part of all rounds, without those that it has none in."""

    def __init__(self, plan: SyncPlan, source: int | None = None, target: int | None = None) -> None:
        """Give the rank of the source, or the one of the target."""
        tensor = plan.plan.target.tensor
        own = tuple(copy for copy in plan.plan.copies if copy.source_rank == source or copy.target_rank == target)
        self._dtypes = {key: tensor(*key).dtype for key in {(copy.target_rank, copy.target) for copy in own}}
        self.rounds: list[_Round] = []
        for number, everybodys in enumerate(plan.rounds, start=1):
            copies = tuple(copy for copy in everybodys if copy.source_rank == source or copy.target_rank == target)
            by_peer: dict[int, list[Copy]] = defaultdict(list)
            for copy in copies:
                by_peer[copy.source_rank if source is None else copy.target_rank].append(copy)
            if copies:
                messages = {peer: _Message(tuple(those), self._end(those)) for peer, those in sorted(by_peer.items())}
                self.rounds.append(_Round(number, copies, messages))
        messages = [(peer, message) for each in self.rounds for peer, message in each.messages.items()]
        self.peers = sorted({peer for peer, _ in messages})
        self.largest = max((message.bytes for _, message in messages), default=0)

    def part(self, buffer: Tensor, start: int, copy: Copy) -> tuple[Tensor, int]:
        """(where a copy lies in a message that is packed up to `start`, where it ends)."""
        dtype = self._dtypes[copy.target_rank, copy.target]
        start, end = self._place(start, dtype, copy.shape)
        return buffer[start:end].view(DTYPES[dtype]).view(copy.shape), end

    def _end(self, copies: Iterable[Copy]) -> int:
        end = 0
        for copy in copies:
            _, end = self._place(end, self._dtypes[copy.target_rank, copy.target], copy.shape)
        return end

    @staticmethod
    def _place(start: int, dtype: str, shape: Shape) -> tuple[int, int]:
        width = BYTES[dtype]
        start = -(-start // width) * width  # where dtypes mix
        return start, start + math.prod(shape) * width


class _Buffers:
    """Buffers of one size, used again and again in one sync."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        return self._free.pop() if self._free else torch.empty(self._size, dtype=torch.uint8, device=self._device)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        self._free += buffers

    def clear(self) -> None:
        self._free.clear()


class PeerSender:
    def __init__(self, plan: SyncPlan, rank: int, tensors: Mapping[str, Tensor], group: Group) -> None:
        self._tensors, self._group = tensors, group
        self._ranks = len(plan.spec.sources)  # workers come after them
        self._messages = _Messages(plan, source=rank)
        self._header = _Header(plan.digest, group)

    def offer(self, version: int) -> dict[str, Any]:
        return {"version": version}

    @torch.no_grad()
    def send(self, version: int) -> int:
        peers = [self._ranks + worker for worker in self._messages.peers]
        self._header.exchange(version, peers, "worker", self._ranks)
        buffers = _Buffers(self._messages.largest, self._group.device)
        under_way: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        sent = 0

        def complete() -> None:
            works, used = under_way.popleft()
            self._group.wait(works)
            buffers.give_back(used)

        for each in self._messages.rounds:
            if len(under_way) == _UNDER_WAY:
                complete()
            used, sends = [], {}
            for worker, message in each.messages.items():
                used.append(buffers.take())
                self._pack(used[-1], message)
                sends[self._ranks + worker] = used[-1][: message.bytes]
                sent += message.bytes
            under_way.append((self._group.exchange(sends, {}, each.number), used))
        while under_way:
            complete()
        return sent

    def withdraw(self) -> None:
        pass  # `send` has copied everything before it returns

    def close(self) -> None:
        self._group.close()

    def _pack(self, buffer: Tensor, message: _Message) -> None:
        position = 0
        for copy in message.copies:
            part, position = self._messages.part(buffer, position, copy)
            part.copy_(self._tensors[copy.source][copy.source_slices])


class PeerReceiver:
    def __init__(self, plan: SyncPlan, worker: int, group: Group) -> None:
        self._group = group
        self._messages = _Messages(plan, target=worker)
        self._header = _Header(plan.digest, group)
        self._buffers = _Buffers(self._messages.largest, group.device)
        self._coming: Iterator[_Round] = iter(())
        self._under_way: deque[tuple[_Round, list[dist.Work], dict[int, Tensor]]] = deque()

    def open(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> None:
        stale = [rank for rank in self._messages.peers if offers.get(rank, {}).get("version", version) != version]
        if stale:
            raise InfrastructureError(f"weight sync: ranks {stale} do not offer version {version}")
        self._header.exchange(version, self._messages.peers, "rank", 0)
        self._coming = iter(self._messages.rounds)
        self._under_way.clear()
        for _ in range(_UNDER_WAY):
            self._begin_next()

    def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
        copies = tuple(copies)
        if not copies:
            return 0
        if not self._under_way or self._under_way[0][0].copies != copies:
            raise RuntimeError("fetch() takes the rounds of this worker one by one, in the plan's order")
        _, works, buffers = self._under_way.popleft()
        self._group.wait(works)
        positions = dict.fromkeys(buffers, 0)
        for copy in copies:
            source = copy.source_rank
            part, positions[source] = self._messages.part(buffers[source], positions[source], copy)
            destination(copy).copy_(part)
        self._buffers.give_back(buffers.values())
        self._begin_next()
        return sum(positions.values())

    def finish(self) -> None:
        if self._under_way:
            raise RuntimeError("finish() comes after the last round")
        self._buffers.clear()

    def close(self) -> None:
        self._group.close()

    def _begin_next(self) -> None:
        following = next(self._coming, None)
        if following is None:
            return
        buffers = {source: self._buffers.take() for source in following.messages}
        receives = {source: buffers[source][: message.bytes] for source, message in following.messages.items()}
        self._under_way.append((following, self._group.exchange({}, receives, following.number), buffers))


class _Header:
    """The first message between two peers of a sync, both ways: which version of the weights, by which plan."""

    def __init__(self, digest: str, group: Group) -> None:
        self._digest, self._group = digest, group

    def exchange(self, version: int, peers: Sequence[int], role: str, first: int) -> None:
        """peers: numbers in the group, of which `first` is the first one of that role."""
        # The digest is 256 bits, which is four numbers.
        words = [int.from_bytes(part, "big", signed=True) for part in _parts(bytes.fromhex(self._digest), 8)]
        own = torch.tensor([version, *words], dtype=torch.int64, device=self._group.device)
        theirs = {peer: torch.empty_like(own) for peer in peers}
        self._group.wait(self._group.exchange(dict.fromkeys(peers, own), theirs, _HEADER_TAG))
        problems = []
        for peer, header in theirs.items():
            if not torch.equal(header[1:], own[1:]):
                problems.append(f"{role} {peer - first} has another plan")
            elif int(header[0]) != version:
                problems.append(f"{role} {peer - first} is at version {int(header[0])}, this one at {version}")
        if problems:
            raise self._group.fail("; ".join(problems))


def _parts(value: bytes, size: int) -> list[bytes]:
    return [value[start : start + size] for start in range(0, len(value), size)]
