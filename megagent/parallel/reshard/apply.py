"""How received weights get into the layers of a vLLM worker: each tensor is opened, written to, and closed.

On CUDA a layer computes with the parameter itself, so that is what is opened: its address stays, and with it every
captured graph. vLLM's CPU kernels compute with packed copies instead. There a fresh tensor is opened, and once all of a
layer's have been closed the layer takes them over and packs them anew, as at its first load.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megagent.parallel.reshard.boxes import LocalTensor, Shape
from megagent.parallel.reshard.plan import Copy
from megagent.parallel.reshard.rounds import Rounds
from megagent.parallel.reshard.transports.base import DTYPES, ReceiverEnd


@dataclass(frozen=True)
class LiveTensor:
    """One parameter of a worker's model, in the shape that vLLM loads it in.

    layer, attribute: where it is; users: the layers that compute with it and may keep a packed form of it, two of them
    where the output layer is the embedding; kept: whether the parameter itself stays as it was loaded, also where the
    layer packs it (on CPU a linear layer drops it, an embedding does not).
    """

    tensor: LocalTensor
    layer: nn.Module
    attribute: str
    users: tuple[nn.Module, ...]
    kept: bool

    @property
    def parameter(self) -> Tensor:
        """What the layer has under the name now: of another shape where it has been packed."""
        return getattr(self.layer, self.attribute)


class Target(Protocol):
    """Where received tensors go."""

    def begin(self) -> None:
        """A new sync; what one that failed has left is forgotten."""
        ...

    def open(self, name: str) -> Tensor:
        """Where the elements of a tensor go, in the shape that the plan says; its padding is zero."""
        ...

    def close(self, name: str) -> None:
        """All of a tensor has been written."""
        ...

    def settle(self) -> None:
        """Waits until everything has been written that was to be."""
        ...


class InPlace:
    """The live parameters themselves."""

    def __init__(self, live: Mapping[str, LiveTensor]) -> None:
        self._live = live

    def begin(self) -> None:
        pass

    def open(self, name: str) -> Tensor:
        return _padded(self._live[name].parameter.data, self._live[name].tensor)

    def close(self, name: str) -> None:
        pass

    def settle(self) -> None:
        for device in {live.parameter.device for live in self._live.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class Repacked:
    """Fresh tensors, taken over layer by layer, as many at a time as one round fills.

    What a layer has not kept serves the next one, and the next sync: memory that the system has yet to give takes
    several times as long to write to.
    """

    def __init__(self, live: Mapping[str, LiveTensor]) -> None:
        self._live = live
        self._fresh: dict[str, Tensor] = {}
        self._spare: dict[tuple[Shape, str], list[Tensor]] = {}  # (shape, dtype) -> tensors that no layer has kept
        self._names: dict[int, set[str]] = {}  # of a layer: the tensors that it computes with
        for name, each in live.items():
            for user in each.users:
                self._names.setdefault(id(user), set()).add(name)
        self._missing: dict[int, set[str]] = {}  # those of them not closed yet

    def begin(self) -> None:
        self._fresh.clear()
        self._missing = {user: set(names) for user, names in self._names.items()}

    def open(self, name: str) -> Tensor:
        live = self._live[name]
        if live.kept:
            return _padded(live.parameter.data, live.tensor)
        shape, dtype = live.tensor.shape, live.tensor.dtype
        spare = self._spare.get((shape, dtype))
        self._fresh[name] = spare.pop() if spare else torch.empty(shape, dtype=DTYPES[dtype])
        return _padded(self._fresh[name], live.tensor)

    def close(self, name: str) -> None:
        for user in self._live[name].users:
            missing = self._missing[id(user)]
            missing.remove(name)
            if not missing:
                self._take_over(user)

    def settle(self) -> None:
        pass

    def _take_over(self, layer: nn.Module) -> None:
        names = self._names[id(layer)]
        taken = {name: self._fresh.pop(name) for name in names & self._fresh.keys()}
        alone = {name: _owners(fresh) for name, fresh in taken.items()}
        for name, fresh in taken.items():
            live = self._live[name]
            if live.parameter.shape == fresh.shape:
                live.parameter.data = fresh  # the parameter keeps what vLLM's own loaders know of it
            else:
                setattr(layer, live.attribute, nn.Parameter(fresh, requires_grad=False))
        repack(layer)
        for name, fresh in taken.items():
            if _owners(fresh) == alone[name]:
                tensor = self._live[name].tensor
                self._spare.setdefault((tensor.shape, tensor.dtype), []).append(fresh)


@dataclass
class Report:
    """One worker's share of one sync: bytes that it received; seconds until they stood there, and seconds that its
    layers then took to take them over; checksum of each tensor, where asked for."""

    version: int
    bytes: int = 0
    receive_s: float = 0.0
    apply_s: float = 0.0
    checksums: dict[str, int] = field(default_factory=dict)


class Incoming:
    """What one worker receives, in the order that all ranks move it in."""

    def __init__(self, rounds: Rounds, rank: int, names: Mapping[str, Any]) -> None:
        """rounds: of the whole plan; rank: of this worker; names: of all its tensors."""
        own = (tuple(copy for copy in each if copy.target_rank == rank) for each in rounds)
        self.rounds = tuple(copies for copies in own if copies)
        self._copies = Counter(copy.target for copies in self.rounds for copy in copies)
        self._padding = [name for name in names if name not in self._copies]  # and nothing else

    def receive(
        self, end: ReceiverEnd, target: Target, version: int, checksum: Callable[[Copy, Tensor], int] | None = None
    ) -> Report:
        """Each tensor is opened before its first copy and closed after its last. The end has been opened.

        checksum: of what a copy has written. Raises what the end raises; the model is then half of one version, half of
        another.
        """
        report, start = Report(version), time.perf_counter()
        target.begin()
        left = self._copies.copy()
        opened: dict[str, Tensor] = {}
        for name in self._padding:
            target.open(name)
        self._close(target, self._padding, report)

        def destination(copy: Copy) -> Tensor:
            if copy.target not in opened:  # also of a later round, for an end that looks ahead
                opened[copy.target] = target.open(copy.target)
            return opened[copy.target][copy.target_slices]

        for copies in self.rounds:
            report.bytes += end.fetch(copies, destination)
            if checksum is not None:
                for copy in copies:
                    total = report.checksums.get(copy.target, 0) + checksum(copy, destination(copy))
                    report.checksums[copy.target] = total % 2**64
            left.subtract(copy.target for copy in copies)
            done = [name for name in dict.fromkeys(copy.target for copy in copies) if not left[name]]
            for name in done:
                del opened[name]
            self._close(target, done, report)
        target.settle()
        end.finish()
        report.receive_s = time.perf_counter() - start - report.apply_s
        return report

    def _close(self, target: Target, names: list[str], report: Report) -> None:
        start = time.perf_counter()
        for name in names:
            target.close(name)
        report.apply_s += time.perf_counter() - start


def repack(layer: Any) -> None:
    """Lets a layer pack the parameters that it has now, as after its first load."""
    forget_packed_experts(layer)
    layer.quant_method.process_weights_after_loading(layer)


def forget_packed_experts(layer: Any) -> None:
    """Makes an experts layer pack its weights again. vLLM 0.32 does so only for a layer that has no kernel yet: on CPU
    weights of a later load would be computed with unpacked, and the result silently be wrong."""
    method: Any = getattr(layer, "quant_method", None)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None


def _owners(tensor: Tensor) -> int:
    """How many tensors and others hold the memory of this one: a layer may compute with it where none of its parameters
    shows it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _padded(tensor: Tensor, layout: LocalTensor) -> Tensor:
    for region in layout.padding:
        tensor[region.slices].zero_()
    return tensor
