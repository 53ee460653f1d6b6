"""Plain copies of bytes between the processes of a weight sync, to compare it with: no plan, no tensors, no layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megagent.parallel.reshard.transports.peers import Group
from tests.parallel.reshard.ends import Recorder

Sizes = Mapping[tuple[int, int], int]  # (rank, worker) -> bytes
TIMEOUT_S = 300.0
_CPU = torch.device("cpu")


class PlainSender:
    """Of one trainer rank: a piece of bytes for each worker, in files of shared memory or to be sent."""

    def __init__(self, rank: int, sizes: Sizes, folder: str | None, group: Group | None) -> None:
        self.group = group
        self.ranks = 1 + max(source for source, _ in sizes)
        self.pieces: dict[int, Tensor] = {}
        for (source, worker), size in sizes.items():
            if source == rank:
                piece = torch.empty(size, dtype=torch.uint8) if folder is None else mapped(folder, rank, worker, size)
                self.pieces[worker] = piece.random_()

    def send(self) -> None:
        if self.group is not None:
            self.group.wait(
                self.group.exchange([(self.ranks + worker, 1, piece) for worker, piece in self.pieces.items()], ())
            )


class PlainReceiver(Recorder):
    """A worker that also takes plain bytes."""

    rank: int

    def plain_open(self, sizes: list[Any], folder: str | None, rendezvous: Sequence[Any] | None) -> None:
        own = {source: size for (source, worker), size in sizes if worker == self.rank}
        # Memory that is used again: the first touch of a page costs more than what is then written to it.
        self.plain_pieces = {source: torch.zeros(size, dtype=torch.uint8) for source, size in own.items()}
        self.plain_mapped = None if folder is None else {s: mapped(folder, s, self.rank, n) for s, n in own.items()}
        ranks = 1 + max(source for (source, _), _ in sizes)
        workers = 1 + max(worker for (_, worker), _ in sizes)
        self.plain_group = None if rendezvous is None else _group(ranks + self.rank, ranks + workers, rendezvous)

    def plain_receive(self) -> None:
        if self.plain_mapped is not None:
            for source, piece in self.plain_pieces.items():
                piece.copy_(self.plain_mapped[source])
        elif self.plain_group is not None:
            receives = [(source, 1, piece) for source, piece in self.plain_pieces.items()]
            self.plain_group.wait(self.plain_group.exchange((), receives))


def plain_open(rank: Any, sizes: Sizes, folder: str | None, rendezvous: Sequence[Any] | None) -> None:
    """A call to a trainer rank."""
    members = 2 + max(source for source, _ in sizes) + max(worker for _, worker in sizes)
    group = None if rendezvous is None else _group(rank.rank, members, rendezvous)
    rank.plain = PlainSender(rank.rank, sizes, folder, group)


def plain_send(rank: Any) -> None:
    """A call to a trainer rank: one message for each worker."""
    rank.plain.send()


def mapped(folder: str, rank: int, worker: int, size: int) -> Tensor:
    """[size] bytes of a file that both ends map."""
    return torch.from_file(f"{folder}/plain-{rank}-{worker}", shared=True, size=size, dtype=torch.uint8)


def _group(number: int, members: int, rendezvous: Sequence[Any]) -> Group:
    return Group("gloo", number, members, rendezvous, _CPU, TIMEOUT_S)
