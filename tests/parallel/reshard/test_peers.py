"""Peers in threads of one process: what travels, in what order; NCCL up to its last calls."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megagent.errors import InfrastructureError, MegagentError
from megagent.parallel.degrees import Degrees
from megagent.parallel.reshard import hold
from megagent.parallel.reshard.boxes import LocalTensor, Region, whole
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import make_plan
from megagent.parallel.reshard.rounds import cut_rounds
from megagent.parallel.reshard.spec import Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import peers, sender_end
from megagent.parallel.reshard.transports.peers import Group, PeerReceiver, PeerSender
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import tiny
from tests.parallel.pool import free_ports
from tests.parallel.reshard.processes import sources, targets

CPU = torch.device("cpu")
FAMILY = "qwen2"
SECONDS = 120.0


def terms(target_dtype: str = "BF16") -> SyncSpec:
    places = (Device("here"),) * 2
    return SyncSpec(Degrees(tp=2), Workers(tp=2), "F32", target_dtype, places, places, buffer_bytes=600)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(call) for call in calls]]


def groups(backend: str, size: int) -> list[Group]:
    port = free_ports(1)[0]
    return [Group(backend, number, size, ("127.0.0.1", port), CPU, SECONDS) for number in range(size)]


class Ends:
    """Both sides of a plan."""

    def __init__(
        self,
        plan: SyncPlan,
        tensors: dict[int, dict[str, torch.Tensor]],
        backend: str = "gloo",
        device: torch.device = CPU,
    ) -> None:
        ranks, workers = len(plan.spec.sources), len(plan.spec.targets)
        self.plan, self.workers = plan, range(workers)
        self.groups = groups(backend, ranks + workers)
        self.senders = [PeerSender(plan, rank, tensors[rank], device, self.groups[rank]) for rank in range(ranks)]
        self.receivers = [PeerReceiver(plan, worker, device, self.groups[ranks + worker]) for worker in range(workers)]

    def sync(self, version: int) -> tuple[int, int, dict[int, dict[str, torch.Tensor]]]:
        """Bytes sent, bytes received, and what the workers have."""
        written = {worker: targets(self.plan, worker) for worker in self.workers}

        def receive(worker: int) -> int:
            receiver = self.receivers[worker]
            receiver.open({rank: sender.offer(version) for rank, sender in enumerate(self.senders)}, version)
            moved = 0
            for copies in self.plan.rounds:
                own = [copy for copy in copies if copy.target_rank == worker]
                moved += receiver.fetch(own, lambda copy: written[worker][copy.target][copy.target_slices])
            receiver.finish()
            return moved

        sends = [lambda sender=sender: sender.send(version) for sender in self.senders]
        receives = [lambda worker=worker: receive(worker) for worker in self.workers]
        moved = together(*sends, *receives)
        return sum(moved[: len(sends)]), sum(moved[len(sends) :]), written

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()


class Coalescing:
    """Gloo, called as NCCL: what is begun between two calls is one piece of work. Its world has joined before."""

    def __init__(self, group: Any) -> None:
        self._group, self._works, self.pieces = group, None, 0
        self.joined = False

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.joined = True
        return self._group.allreduce(tensors)

    def _start_coalescing(self) -> None:
        assert self.joined
        assert self._works is None
        self._works = []

    def send(self, *arguments: Any) -> None:
        self._works.append(self._group.send(*arguments))

    def recv(self, *arguments: Any) -> None:
        self._works.append(self._group.recv(*arguments))

    def _end_coalescing(self) -> Any:
        works, self._works = self._works, None
        assert works, "NCCL is not asked for nothing"
        self.pieces += 1
        return AllOf(works)

    def abort(self) -> None:
        self._group.abort()


class AllOf:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self, timeout: Any) -> None:
        for work in self.works:
            work.wait(timeout)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("alone", [1, 100, 1 << 20])  # bytes from which a copy has a message of its own
def test_what_the_plan_says_arrives_in_the_targets_dtype(
    backend: str, dtype: str, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_ALONE", alone)
    make = peers._make_group
    if backend == "nccl":
        monkeypatch.setattr(peers, "_make_group", lambda _, *rest: Coalescing(make("gloo", *rest)))
    plan = make_sync_plan(terms(dtype), tiny(FAMILY))
    held = {
        rank: {name: torch.nn.Parameter(tensor) for name, tensor in sources(plan, FAMILY, rank).items()}
        for rank in range(2)
    }
    ends = Ends(plan, held, backend)
    expected = {worker: targets(plan, worker) for worker in ends.workers}
    with torch.no_grad():
        hold.execute(plan.plan, held, expected)
    for version in (1, 2):
        sent, received, written = ends.sync(version)
        assert sent == received == sum(plan.plan.traffic.values())
        assert all(
            torch.equal(written[worker][name], tensor)
            for worker, named in expected.items()
            for name, tensor in named.items()
        )
    ends.close()


def assert_equal_layouts_sync(device: torch.device = CPU) -> None:
    """Two ranks and two workers that hold the same tensors; device: where they say that these lie."""
    layout = Layout("both", dict.fromkeys(range(2), (whole("rows", (6, 4), "F32"), whole("vector", (7,), "F32"))))
    plan = make_plan(layout, layout)
    held = {rank: {"rows": torch.randn(6, 4), "vector": torch.randn(7)} for rank in range(2)}
    ends = Ends(SyncPlan(terms(), plan, cut_rounds(plan, 60)), held, device=device)
    _, _, written = ends.sync(1)
    assert all(torch.equal(written[rank][name], held[rank][name]) for rank in range(2) for name in held[rank])
    ends.close()


def test_large_rows_go_from_the_trainers_memory_into_the_workers_and_nothing_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_ALONE", 1)
    monkeypatch.setattr(peers._Buffers, "room", lambda *_: pytest.fail("a buffer"))
    assert_equal_layouts_sync()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_group_cannot_take_as_it_lies_goes_through_buffers(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights of a GPU do over Gloo, and parameters that do not lie as the plan assumes."""
    monkeypatch.setattr(peers, "_ALONE", 1)
    monkeypatch.setattr(Group, "takes", lambda self, tensor: False)
    assert_equal_layouts_sync(torch.device("meta") if elsewhere else CPU)


@pytest.mark.parametrize(
    ("start", "extent", "whole_shape", "one"),
    [
        ((0, 0), (2, 4), (6, 4), True),
        ((1, 0), (2, 3), (6, 4), False),
        ((5, 1), (1, 3), (6, 4), True),
        ((2, 1, 0), (3, 4), (5, 6, 4), True),  # rows of one matrix of a stack
        ((2, 1, 0), (3, 3), (5, 6, 4), False),
        ((3,), (2,), (9,), True),
        ((0, 0), (6, 1), (6, 4), False),
        ((), (), (), True),
    ],
)
def test_a_part_is_in_one_piece_if_it_is_contiguous(
    start: tuple[int, ...], extent: tuple[int, ...], whole_shape: tuple[int, ...], one: bool
) -> None:
    region = Region(start, extent)
    assert peers._in_one_piece(region, whole_shape) == one == torch.empty(whole_shape)[region.slices].is_contiguous()


def test_targets_of_several_dtypes_share_a_message() -> None:
    """Elements lie at multiples of their width, wherever the message before them ends."""

    def layout(name: str, ranks: range, *dtypes: str) -> Layout:
        tensors: tuple[LocalTensor, ...] = tuple(
            whole(f"tensor{number}", (3,), dtype) for number, dtype in enumerate(dtypes)
        )
        return Layout(name, dict.fromkeys(ranks, tensors))

    source = layout("source", range(2), "F32", "F32", "F32")
    plan = make_plan(source, layout("target", range(2), "BF16", "F32", "F64"), cast=True)
    made = SyncPlan(terms(), plan, cut_rounds(plan, 100))
    held = {rank: {f"tensor{number}": torch.randn(3) for number in range(3)} for rank in range(2)}
    ends = Ends(made, held)
    _, _, written = ends.sync(1)
    for worker in range(2):
        for name, tensor in written[worker].items():
            assert torch.equal(tensor, held[worker][name].to(tensor.dtype))
    ends.close()


@pytest.mark.parametrize("alone", [1, 1 << 20])
def test_two_rounds_at_most_are_under_way_in_buffers_that_are_used_again(
    alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_ALONE", alone)
    taken: list[int] = []
    make = torch.empty

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            taken.append(arguments[0])
        return make(*arguments, **options)

    monkeypatch.setattr(torch, "empty", counted)
    plan = make_sync_plan(terms(), tiny(FAMILY))
    ends = Ends(plan, {rank: sources(plan, FAMILY, rank) for rank in range(2)})
    ends.sync(1)
    ends.close()
    assert len(plan.rounds) > 3
    pairs = len(plan.plan.traffic)
    assert len(taken) <= 2 * 2 * pairs  # both ends of a pair, two rounds
    assert max(taken) <= plan.spec.buffer_bytes + 16 * len(plan.plan.copies)  # messages begin at whole words


def test_a_worker_takes_the_rounds_in_their_order() -> None:
    plan = make_sync_plan(terms(), tiny(FAMILY))
    receiver = PeerReceiver(plan, 0, CPU, groups("gloo", 4)[3])
    with pytest.raises(RuntimeError, match="one by one, in the plan's order"):
        receiver.fetch(plan.rounds[0], lambda copy: torch.empty(copy.shape))


def test_nobody_listens_on_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InfrastructureError, match="use a host and a port that are free"):
            Group("gloo", 0, 2, taken.getsockname(), CPU, SECONDS)


def test_peers_that_never_come_are_not_waited_for_longer_than_said() -> None:
    group = Group("gloo", 0, 2, ("127.0.0.1", free_ports(1)[0]), CPU, 0.5)
    for _ in range(2):  # and the group is of no use from then on
        with pytest.raises(InfrastructureError, match="a peer could not be reached within"):
            group.exchange([(1, 1, torch.zeros(1))], ())


def test_the_default_group_is_left_alone() -> None:
    one, two = groups("gloo", 2)
    buffer = torch.zeros(3)

    def send() -> None:
        one.wait(one.exchange([(1, 5, torch.arange(3.0))], ()))

    def receive() -> None:
        two.wait(two.exchange((), [(0, 5, buffer)]))

    together(send, receive)
    assert buffer.tolist() == [0, 1, 2]
    assert not dist.is_initialized()
    one.close()
    two.close()


def test_nccl_is_not_asked_to_serve_two_processes_of_one_gpu() -> None:
    with pytest.raises(MegagentError, match="NCCL has one process on a GPU, and trainer and engines share 1"):
        sender_end("nccl", make_sync_plan(terms(), tiny(FAMILY)), 0, {}, ["127.0.0.1", 1])


def test_nccls_group_is_made_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nccl:
        class Options:
            _timeout: Any = None

        def __init__(self, store: Any, number: int, size: int, options: Any) -> None:
            self.said = (store, number, size, options._timeout.total_seconds())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    made = peers._make_group("nccl", "store", 2, 4, "127.0.0.1", 1, timedelta(seconds=7))
    assert made.said == ("store", 2, 4, 14.0)  # of the watchdog, which comes after the deadline
