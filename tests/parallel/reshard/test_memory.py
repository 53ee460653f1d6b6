"""Tensors of one process in another's view: shared memory for real, CUDA IPC up to its last calls."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from typing import Any, ClassVar

import pytest
import torch
from torch import UntypedStorage

from megagent.errors import InfrastructureError, MegagentError
from megagent.parallel.degrees import Degrees
from megagent.parallel.reshard import hold
from megagent.parallel.reshard.sender import Sender
from megagent.parallel.reshard.spec import Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import mapped, receiver_end, sender_end
from megagent.parallel.reshard.transports.memory import CudaMemory, HostMemory, Memory
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.models.configs import tiny
from tests.parallel.reshard.processes import sources, targets

CPU = torch.device("cpu")
FAMILY = "qwen2"


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def open_files() -> set[tuple[int, int]]:
    """Inode and device of all that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            found.add((status.st_ino, status.st_dev))
    return found


def test_sharing_moves_a_storage_once_and_all_its_views_follow() -> None:
    base = torch.arange(12.0)
    view, parameter = base[4:8], torch.nn.Parameter(base.view(3, 4))
    memory = HostMemory()
    handle = memory.share(view.untyped_storage())
    assert memory.share(parameter.untyped_storage()) == handle
    seen = memory.open(as_json(handle)).view(torch.float32)
    assert seen.tolist() == list(range(12))
    view.fill_(-1.0)
    parameter.data[2] = 5.0
    assert seen.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, 5, 5, 5, 5]
    assert base.tolist() == seen.tolist()


def test_nothing_is_left_when_the_tensors_are_gone() -> None:
    tensor = torch.zeros(1000)
    memory = HostMemory()
    handle = memory.share(tensor.untyped_storage())
    seen = memory.open(handle)
    assert (handle["inode"], handle["device"]) in open_files()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    del tensor, seen
    gc.collect()
    assert (handle["inode"], handle["device"]) not in open_files()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pid": 2**22 + 1}, "No such file"),
        ({"inode": 1}, "it is another file"),
        ({"bytes": 1 << 40}, "it has 48 of 1099511627776 bytes"),
    ],
)
def test_memory_that_is_no_longer_what_it_was_is_refused(change: dict[str, int], words: str) -> None:
    tensor = torch.arange(12.0)
    handle = HostMemory().share(tensor.untyped_storage())
    with pytest.raises(InfrastructureError, match=words):
        HostMemory().open(handle | change)


def test_memory_that_does_not_fit_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(storage: UntypedStorage) -> tuple[int, int]:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(UntypedStorage, "_share_fd_cpu_", full)
    with pytest.raises(
        MegagentError, match="48 bytes of weights cannot be moved into shared memory.*rollout.sync=gloo"
    ):
        HostMemory().share(torch.arange(12.0).untyped_storage())


# --- CUDA IPC without CUDA --------------------------------------------------------------------------------------------


class PaperGpus(CudaMemory):
    """Its last calls answer from the storages of this process."""

    exported: ClassVar[dict[bytes, UntypedStorage]] = {}
    calls: ClassVar[list[str]] = []

    def __init__(self, gpus: list[str], own: int = 0) -> None:
        super().__init__(torch.device("cuda", own))
        self.gpus = gpus
        self.opened_on: list[int] = []

    def _export(self, storage: UntypedStorage) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
        name = b"\x00\xff" + storage.data_ptr().to_bytes(8, "big")
        self.exported[name] = storage
        self.calls.append("export")
        return 1, name, storage.nbytes(), 0, b"\x80counter", 3, b"event\x00", True

    def _import(self, *arguments: Any) -> UntypedStorage:
        index, name, size, offset, counter, counter_offset, event, waits = arguments
        assert (offset, counter, counter_offset, event, waits) == (0, b"\x80counter", 3, b"event\x00", True)
        self.opened_on.append(index)
        if name not in self.exported:
            raise RuntimeError("invalid resource handle\nmore")
        assert self.exported[name].nbytes() == size
        return self.exported[name]

    def _gpus(self) -> list[str]:
        return self.gpus

    def settle(self) -> None:
        self.calls.append("settle")


def test_a_gpu_is_known_by_its_identity_and_not_by_its_number() -> None:
    """Trainer and engine see GPUs of a node in orders of their own, and an engine may not see the trainer's at all."""
    tensor = torch.arange(4.0)
    handle = as_json(PaperGpus(["GPU-a", "GPU-b"]).share(tensor.untyped_storage()))
    for sees, own, index in ((["GPU-b", "GPU-a"], 1, 0), (["GPU-c", "GPU-d"], 1, 1)):
        engine = PaperGpus(sees, own)
        assert engine.open(handle).view(torch.float32).tolist() == [0, 1, 2, 3]
        assert engine.opened_on == [index]


def test_a_handle_is_made_once_and_one_that_is_void_says_so() -> None:
    PaperGpus.calls.clear()
    memory = PaperGpus(["GPU-a", "GPU-b"])
    tensor = torch.arange(4.0)
    assert memory.share(tensor.untyped_storage()) == memory.share(tensor[2:].untyped_storage())
    assert PaperGpus.calls == ["export"]
    with pytest.raises(InfrastructureError, match=r"memory of GPU GPU-b .* \(invalid resource handle\)"):
        memory.open(memory.share(tensor.untyped_storage()) | {"memory": "00"})


# --- both through the ends of a sync ----------------------------------------------------------------------------------


def plan_of(degrees: Degrees, nodes: str = "here", target_dtype: str = "BF16") -> SyncPlan:
    places = (Device(nodes),) * degrees.world
    spec = SyncSpec(degrees, Workers(tp=2), "F32", target_dtype, places, (Device("here"),) * 2, buffer_bytes=400)
    return make_sync_plan(spec, tiny(FAMILY))


@pytest.mark.parametrize("memory", [HostMemory(), PaperGpus(["GPU-a", "GPU-b"])], ids=["host", "cuda"])
def test_receivers_read_every_version_from_where_it_lies(memory: Memory) -> None:
    plan = plan_of(Degrees(tp=2, pp=2))
    held = {rank: sources(plan, FAMILY, rank) for rank in plan.plan.source.tensors}
    senders = {rank: mapped.MappedSender(tensors, memory) for rank, tensors in held.items()}
    receivers = {worker: mapped.MappedReceiver(plan, worker, memory) for worker in plan.plan.target.tensors}
    for version, change in enumerate((0.0, 3.0)):
        for rank, tensors in held.items():
            senders[rank].withdraw()
            for name, values in sources(plan, FAMILY, rank, change).items():
                tensors[name].copy_(values)
        offers = as_json({rank: sender.offer(version) for rank, sender in senders.items()})
        offers = {int(rank): offer for rank, offer in offers.items()}
        written = {worker: targets(plan, worker) for worker in receivers}
        expected = {worker: targets(plan, worker) for worker in receivers}
        hold.execute(plan.plan, held, expected)
        moved = 0
        for worker, receiver in receivers.items():
            receiver.open(offers, version)
            for copies in plan.rounds:
                moved += receiver.fetch(
                    [copy for copy in copies if copy.target_rank == worker],
                    lambda copy, of=written[worker]: of[copy.target][copy.target_slices],
                )
            receiver.finish()
            for name, tensor in expected[worker].items():
                assert torch.equal(written[worker][name], tensor), name
        assert moved == sum(plan.plan.traffic.values())


def test_storages_that_stay_are_opened_once() -> None:
    plan = plan_of(Degrees())
    memory = PaperGpus(["GPU-a", "GPU-b"])
    tensors = sources(plan, FAMILY, 0)
    sender, receiver = mapped.MappedSender(tensors, memory), mapped.MappedReceiver(plan, 0, memory)
    receiver.open({0: sender.offer(1)}, 1)
    opened = len(memory.opened_on)
    assert opened == len(tensors)
    receiver.open({0: sender.offer(2)}, 2)
    assert len(memory.opened_on) == opened


def test_a_version_is_offered_again_only_while_it_stands() -> None:
    plan = plan_of(Degrees())
    sender = Sender(plan, 0, sources(plan, FAMILY, 0), "shared_memory")
    assert sender.offer(4) == sender.offer(4)
    for withdraw, version in ((False, 3), (True, 4), (False, -1)):
        if withdraw:
            sender.withdraw()
        with pytest.raises(MegagentError, match=f"version {version} is offered after version 4"):
            sender.offer(version)
    sender.offer(5)


# --- what a transport refuses -----------------------------------------------------------------------------------------


def test_transports_that_cannot_carry_the_plan_say_why_and_which_can() -> None:
    apart, near = plan_of(Degrees(), nodes="there"), plan_of(Degrees())
    for transport, plan, words in (
        ("pigeon", near, "there is no such transport; use one of shared_memory, cuda_ipc, gloo, nccl"),
        ("shared_memory", apart, "weights go between there and here; or use gloo"),
        ("cuda_ipc", near, "it moves weights on cuda, and these are on cpu; or use shared_memory or gloo"),
        ("gloo", near, r"a rendezvous, \[host, port\]; or use shared_memory"),
    ):
        with pytest.raises(MegagentError, match=f"rollout.sync={transport}: .*{words}"):
            receiver_end(transport, plan, 0, CPU)
        with pytest.raises(MegagentError, match=f"rollout.sync={transport}: .*{words}"):
            sender_end(transport, plan, 0, sources(plan, FAMILY, 0))


def test_tensors_that_are_not_what_was_planned_are_named_together() -> None:
    plan = plan_of(Degrees())
    tensors = sources(plan, FAMILY, 0)
    names = list(tensors)
    del tensors[names[0]]
    tensors[names[1]] = tensors[names[1]].double()
    tensors[names[2]] = torch.zeros(2 * tensors[names[2]].numel())[::2].view_as(tensors[names[2]])
    with pytest.raises(MegagentError) as caught:
        Sender(plan, 0, tensors, "shared_memory")
    assert [line.strip().split(" ")[0] for line in str(caught.value).splitlines()[1:]] == names[:3]
    assert "is missing" in str(caught.value)
    assert "is torch.float64" in str(caught.value)
    assert "does not lie in one piece" in str(caught.value)


def test_only_an_offered_version_is_sent() -> None:
    plan = plan_of(Degrees())
    sender = Sender(plan, 0, sources(plan, FAMILY, 0), "shared_memory")
    with pytest.raises(InfrastructureError, match="version 1 is wanted of rank 0, which offers nothing"):
        sender.send(1)
    sender.offer(1)
    assert sender.send(1) == 0
    sender.withdraw()
    with pytest.raises(InfrastructureError, match="which offers nothing"):
        sender.send(1)
