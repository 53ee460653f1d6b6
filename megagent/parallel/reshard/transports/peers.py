"""Peer transports: trainer ranks and workers walk through the rounds of the plan and send each other their share.

One process group of its own over all trainer ranks and, after them, all workers; Gloo and NCCL differ in how it is
made. What a rank sends another in one round travels in a packed buffer, cast to the target's dtype while it is packed;
a large copy into one piece of memory travels by itself, into that memory and, where nothing is cast or gathered, from
the trainer's own.
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
from megagent.parallel.reshard.boxes import LocalTensor, Region, Shape
from megagent.parallel.reshard.plan import BYTES, Copy
from megagent.parallel.reshard.spec import SyncPlan
from megagent.parallel.reshard.transports.base import DTYPES, Destination

_UNDER_WAY = 2  # rounds that are begun at a time: one travels while the other is packed, or unpacked and made use of
_ALONE = 256 << 10  # bytes from which a copy is worth a message
_ALIGNMENT = 16  # bytes
_HEADER_TAG = 0

Messages = Iterable[tuple[int, int, Tensor]]  # number of the peer, tag, bytes


class Group:
    """A process group beside torch's default one, joined at the first use. Every wait in it has a deadline.

    After a failure it is of no use to anybody: all later calls raise.
    """

    def __init__(
        self, backend: str, number: int, size: int, rendezvous: Sequence[Any], device: torch.device, timeout_s: float
    ) -> None:
        """number: of this process in the group; rendezvous: host and port where number 0 listens, from now on; device:
        of what is sent and received."""
        self.name = f"{backend} at {rendezvous[0]}:{rendezvous[1]}"
        self.backend, self.number, self.size, self.device = backend, number, size, device
        self.host, self.port = str(rendezvous[0]), int(rendezvous[1])
        self.timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._failed: str | None = None
        self._store = self._listen() if number == 0 else None

    def takes(self, tensor: Tensor) -> bool:
        """Whether it can be sent from, and received into, as it lies."""
        return tensor.device.type == self.device.type and tensor.is_contiguous()

    def exchange(self, sends: Messages, receives: Messages) -> list[dist.Work]:
        """Begin to send and to receive. Messages between two peers are in the same order at both, and their tags
        differ."""
        with self._failing("could not be reached"):
            group = self._joined()
            together = self.backend == "nccl"  # so that NCCL uses the one communicator that all have joined
            sends, receives = list(sends), list(receives)
            if not sends and not receives:
                return []
            if together:
                group._start_coalescing()
            works = [group.send([buffer], peer, tag) for peer, tag, buffer in sends]
            works += [group.recv([buffer], peer, tag) for peer, tag, buffer in receives]
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
        options._timeout = 2 * timeout  # NCCL's watchdog ends the process; a wait's own deadline comes first
        return ProcessGroupNCCL(store, number, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
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
    """A part of what goes from one rank to another in one round.

    peer: the other's rank; start: where it lies in the buffer for this
    peer and round, None if this end needs no room for it: it is sent from, or received into, its tensor.
    """

    peer: int
    tag: int
    copies: tuple[Copy, ...]
    bytes: int
    start: int | None


@dataclass(frozen=True)
class _Round:
    """One end's part of a round."""

    copies: tuple[Copy, ...]
    messages: tuple[_Message, ...]


class _Rounds:
    """One end's part of all rounds, without those that it has none in."""

    def __init__(self, plan: SyncPlan, direct: bool, source: int | None = None, target: int | None = None) -> None:
        """direct: whether tensors lie where messages are sent from and received into; give the rank of the source, or
        the one of the target."""
        self._sources, self._targets = plan.plan.source, plan.plan.target
        self.rounds: list[_Round] = []
        self.largest = 0  # bytes of a buffer for one peer
        tags: dict[int, int] = defaultdict(lambda: _HEADER_TAG)
        for everybodys in plan.rounds:
            copies = tuple(copy for copy in everybodys if copy.source_rank == source or copy.target_rank == target)
            packed: dict[int, list[Copy]] = defaultdict(list)
            alone: dict[int, list[Copy]] = defaultdict(list)
            for copy in copies:
                peer = copy.source_rank if source is None else copy.target_rank
                (alone if self._goes_alone(copy) else packed)[peer].append(copy)
            messages = []
            for peer in sorted(packed.keys() | alone.keys()):
                start = 0
                for part in (packed[peer], *([copy] for copy in alone[peer])):
                    if not part:
                        continue
                    tags[peer] += 1
                    size, is_alone = self._end(part), part is not packed[peer]
                    needs_room = not (direct and is_alone and (source is None or self._leaves_as_it_is(part[0])))
                    place = start if needs_room else None
                    messages.append(_Message(peer, tags[peer], tuple(part), size, place))
                    if needs_room:
                        start += -(-size // _ALIGNMENT) * _ALIGNMENT
                        self.largest = max(self.largest, start)
            if copies:
                self.rounds.append(_Round(copies, tuple(messages)))
        self.peers = sorted({message.peer for each in self.rounds for message in each.messages})

    def parts(self, content: Tensor, message: _Message) -> Iterator[tuple[Copy, Tensor]]:
        """Where the copies of a message lie in its bytes."""
        end = 0
        for copy in message.copies:
            dtype = self._tensor(copy).dtype
            start, end = self._place(end, dtype, copy.shape)
            yield copy, content[start:end].view(DTYPES[dtype]).view(copy.shape)

    def _tensor(self, copy: Copy) -> LocalTensor:
        return self._targets.tensor(copy.target_rank, copy.target)

    def _goes_alone(self, copy: Copy) -> bool:
        tensor = self._tensor(copy)
        region = Region(copy.target_start, copy.shape)
        return math.prod(copy.shape) * BYTES[tensor.dtype] >= _ALONE and _in_one_piece(region, tensor.shape)

    def _leaves_as_it_is(self, copy: Copy) -> bool:
        held = self._sources.tensor(copy.source_rank, copy.source)
        return held.dtype == self._tensor(copy).dtype and _in_one_piece(
            Region(copy.source_start, copy.shape), held.shape
        )

    def _end(self, copies: Iterable[Copy]) -> int:
        end = 0
        for copy in copies:
            _, end = self._place(end, self._tensor(copy).dtype, copy.shape)
        return end

    @staticmethod
    def _place(start: int, dtype: str, shape: Shape) -> tuple[int, int]:
        width = BYTES[dtype]
        start = -(-start // width) * width  # where dtypes mix
        return start, start + math.prod(shape) * width


def _in_one_piece(region: Region, shape: Shape) -> bool:
    """Whether a part of a contiguous tensor of this shape is contiguous itself."""
    first = next((axis for axis, size in enumerate(region.extent) if size > 1), len(shape))
    return region.extent[first + 1 :] == shape[first + 1 :]


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: [bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8)


class _Buffers:
    """Buffers of one size, used again and again in one sync."""

    def __init__(self, size: int, device: torch.device, carrier: torch.device) -> None:
        """device: where the weights lie; carrier: where the buffers do."""
        self._size, self._carrier = size, carrier
        self._pinned = carrier.type == "cpu" and device.type == "cuda"
        self._free: list[Tensor] = []

    def room(self, message: _Message, used: dict[int, Tensor]) -> Tensor:
        """For a message, in the buffer that is in use for its peer; a free one is from now on, if none is."""
        if message.start is None:
            return torch.empty(message.bytes, dtype=torch.uint8, device=self._carrier)
        if message.peer not in used:
            used[message.peer] = self._free.pop() if self._free else self._fresh()
        return used[message.peer][message.start : message.start + message.bytes]

    def _fresh(self) -> Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self._carrier, pin_memory=self._pinned)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        self._free += buffers

    def clear(self) -> None:
        self._free.clear()


class PeerSender:
    def __init__(
        self, plan: SyncPlan, rank: int, tensors: Mapping[str, Tensor], device: torch.device, group: Group
    ) -> None:
        self._tensors, self._device, self._group = tensors, device, group
        self._ranks = len(plan.spec.sources)  # workers come after them
        self._rounds = _Rounds(plan, device.type == group.device.type, source=rank)
        self._header = _Header(plan.digest, group)

    def offer(self, version: int) -> dict[str, Any]:
        return {"version": version}

    @torch.no_grad()
    def send(self, version: int) -> int:
        self._header.exchange(version, [self._ranks + worker for worker in self._rounds.peers], "worker", self._ranks)
        buffers = _Buffers(self._rounds.largest, self._device, self._group.device)
        under_way: deque[tuple[list[dist.Work], dict[int, Tensor]]] = deque()
        sent = 0

        def complete() -> None:
            works, used = under_way.popleft()
            self._group.wait(works)
            buffers.give_back(used.values())

        for each in self._rounds.rounds:
            if len(under_way) == _UNDER_WAY:
                complete()
            used: dict[int, Tensor] = {}  # by peer
            sends = []
            for message in each.messages:
                content = self._own(message)
                if content is None:
                    content = buffers.room(message, used)
                    for copy, part in self._rounds.parts(content, message):
                        part.copy_(self._tensors[copy.source][copy.source_slices])
                sends.append((self._ranks + message.peer, message.tag, content))
                sent += message.bytes
            under_way.append((self._group.exchange(sends, ()), used))
        while under_way:
            complete()
        return sent

    def withdraw(self) -> None:
        pass  # when `send` returns, everything has left the tensors

    def close(self) -> None:
        self._group.close()

    def _own(self, message: _Message) -> Tensor | None:
        """The content where it lies, None if it has to be packed first."""
        if message.start is not None:
            return None
        (copy,) = message.copies
        part = self._tensors[copy.source][copy.source_slices]
        return _bytes_of(part) if self._group.takes(part) else None


@dataclass(frozen=True)
class _Receiving:
    """A round that a worker has begun to receive. packed: messages that go on from a buffer; used: those buffers."""

    round: _Round
    works: list[dist.Work]
    packed: list[tuple[_Message, Tensor]]
    used: dict[int, Tensor]


class PeerReceiver:
    def __init__(self, plan: SyncPlan, worker: int, device: torch.device, group: Group) -> None:
        self._group = group
        self._rounds = _Rounds(plan, device.type == group.device.type, target=worker)
        self._header = _Header(plan.digest, group)
        self._buffers = _Buffers(self._rounds.largest, device, group.device)
        self._coming: deque[_Round] = deque()
        self._begun: deque[_Receiving] = deque()

    def open(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> None:
        stale = [rank for rank in self._rounds.peers if offers.get(rank, {}).get("version", version) != version]
        if stale:
            raise InfrastructureError(f"weight sync: ranks {stale} do not offer version {version}")
        self._header.exchange(version, self._rounds.peers, "rank", 0)
        self._coming, self._begun = deque(self._rounds.rounds), deque()

    def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
        copies = tuple(copies)
        if not copies:
            return 0
        following = self._begun[0].round if self._begun else next(iter(self._coming), None)
        if following is None or following.copies != copies:
            raise RuntimeError("fetch() takes the rounds of this worker one by one, in the plan's order")
        while self._coming and len(self._begun) < _UNDER_WAY:
            self._begin(self._coming.popleft(), destination)
        begun = self._begun.popleft()
        self._group.wait(begun.works)
        for message, content in begun.packed:
            for copy, part in self._rounds.parts(content, message):
                destination(copy).copy_(part)
        self._buffers.give_back(begun.used.values())
        return sum(message.bytes for message in begun.round.messages)

    def _begin(self, each: _Round, destination: Destination) -> None:
        receives, packed = [], []
        used: dict[int, Tensor] = {}  # by peer
        for message in each.messages:
            place = destination(message.copies[0]) if message.start is None else None
            if place is not None and self._group.takes(place):
                content = _bytes_of(place)
            else:
                content = self._buffers.room(message, used)
                packed.append((message, content))
            receives.append((message.peer, message.tag, content))
        self._begun.append(_Receiving(each, self._group.exchange((), receives), packed, used))

    def finish(self) -> None:
        if self._coming or self._begun:
            raise RuntimeError("finish() comes after the last round")
        self._buffers.clear()

    def close(self) -> None:
        self._group.close()


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
        sends = [(peer, _HEADER_TAG, own) for peer in peers]
        self._group.wait(self._group.exchange(sends, [(peer, _HEADER_TAG, header) for peer, header in theirs.items()]))
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
