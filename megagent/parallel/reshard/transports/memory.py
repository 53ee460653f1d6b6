"""Storages of one process that another reads: each has a name, plain JSON, by which a process of the node opens it."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from megagent.errors import InfrastructureError, MegagentError

Handle = dict[str, Any]


class Memory(Protocol):
    def share(self, storage: UntypedStorage) -> Handle:
        """The name of a storage, the same one each time. All tensors on the storage stay valid and go on to see each
        other's changes. Raises MegagentError if it cannot be shared."""
        ...

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """The bytes of a storage, to be read only: [bytes] uint8. Raises InfrastructureError if there is none of that
        name any more."""
        ...

    def settle(self) -> None:
        """Waits until the device has done what this process asked of it so far."""
        ...


class HostMemory:
    """Shared memory of the node. It has no name in the file system: whoever knows the process opens its descriptor,
    nothing is left to clean up, and the last process that maps it frees it by its end."""

    def share(self, storage: UntypedStorage) -> Handle:
        """A storage that lies elsewhere is moved, once. Its tensors follow: they refer to it and not to its place."""
        try:
            descriptor, size = storage._share_fd_cpu_()
        except RuntimeError as error:
            free = _free_bytes()
            raise MegagentError(
                f"weight sync: {storage.nbytes()} bytes of weights cannot be moved into shared memory, where "
                f"{free} bytes are free ({_first_line(error)}); give /dev/shm more room (or this process more open "
                "files), or use rollout.sync=gloo"
            ) from error
        status = os.fstat(descriptor)
        return {"pid": os.getpid(), "fd": descriptor, "inode": status.st_ino, "device": status.st_dev, "bytes": size}

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        path = f"/proc/{int(handle['pid'])}/fd/{int(handle['fd'])}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _gone(path, str(error)) from error
        try:
            status = os.fstat(descriptor)
            # Numbers of processes and descriptors are given out again, and mean others in another container.
            if (status.st_ino, status.st_dev) != (handle["inode"], handle["device"]):
                raise _gone(path, "it is another file")
            if status.st_size < handle["bytes"]:
                raise _gone(path, f"it has {status.st_size} of {handle['bytes']} bytes")
            mapped = mmap.mmap(descriptor, handle["bytes"], access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(mapped, dtype=torch.uint8)

    def settle(self) -> None:
        pass


class CudaMemory:
    """Memory of a GPU, by the handles of CUDA IPC. Whoever opens it has to end before, or close, the one who owns it.

    A handle is made and opened once: each is counted by torch until its reader drops it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handles: dict[int, Handle] = {}  # by address

    def share(self, storage: UntypedStorage) -> Handle:
        address = storage.data_ptr()
        known = self._handles.get(address)
        if known is None or known["bytes"] != storage.nbytes():
            index, memory, size, offset, counter, counter_offset, event, waits = self._export(storage)
            known = self._handles[address] = {
                "gpu": self._gpus()[index],
                "memory": memory.hex(),
                "bytes": size,
                "offset": offset,
                "counter": counter.hex(),
                "counter_offset": counter_offset,
                "event": event.hex(),
                "event_waits": waits,
            }
        return known

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        # A GPU that this process was not given cannot be named here, but its memory can be opened all the same.
        gpus = self._gpus()
        index = gpus.index(handle["gpu"]) if handle["gpu"] in gpus else self.device.index or 0
        try:
            storage = self._import(
                index,
                bytes.fromhex(handle["memory"]),
                handle["bytes"],
                handle["offset"],
                bytes.fromhex(handle["counter"]),
                handle["counter_offset"],
                bytes.fromhex(handle["event"]),
                handle["event_waits"],
            )
        except RuntimeError as error:
            raise _gone(f"memory of GPU {handle['gpu']}", _first_line(error)) from error
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    # The last calls, as torch.multiprocessing.reductions makes them; all else runs without a GPU too.

    def _export(self, storage: UntypedStorage) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
        return storage._share_cuda_()

    def _import(self, *arguments: Any) -> UntypedStorage:
        return UntypedStorage._new_shared_cuda(*arguments)

    def _gpus(self) -> list[str]:
        """The identity of each GPU that this process sees."""
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _gone(what: str, why: str) -> InfrastructureError:
    return InfrastructureError(
        f"weight sync: {what} of the trainer cannot be opened ({why}). It has ended, or belongs to another user or "
        "container: start the run again, or let weights travel by rollout.sync=gloo (nccl)."
    )


def _free_bytes() -> int:
    room = os.statvfs("/dev/shm")
    return room.f_bavail * room.f_frsize


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
