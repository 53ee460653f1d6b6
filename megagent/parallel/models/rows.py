"""The kinds of rows of a family's table: which boxes of Hugging Face tensors make up a Megatron tensor on each rank.

Names: a Megatron name holds the global number of its layer and expert ("decoder.layers.27", counted over all stages); a
table writes them as {layer} and {expert}. Shapes in a table are names of sizes, see `Architecture`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from megagent.errors import MegagentError
from megagent.parallel.reshard.boxes import Box, LocalTensor, Region, Shape

Stage = Literal["first", "layer", "last"]  # of the pipeline: where a tensor lives


class Sizes(Protocol):
    """What a row asks of an architecture."""

    @property
    def query(self) -> int: ...
    @property
    def key(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...

    def shape(self, names: Iterable[str]) -> Shape: ...


@dataclass(frozen=True)
class Row(ABC):
    """Base of the kinds of rows. `megatron` is the tensor's name, or its names where layer specs differ in it.

    at: the pipeline stage that holds the tensor; every stage holds the {layer} tensors of its own layers.
    when: the flag of the architecture without which there is no such tensor.
    A row with {expert} in its name is split over the expert-tensor ranks, any other over the tensor ranks.
    """

    megatron: str | tuple[str, ...]
    at: Stage = "layer"
    when: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    @property
    def of_experts(self) -> bool:
        return "{expert}" in self.names[0]

    @abstractmethod
    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        """Shape of each Hugging Face tensor that this row is made of, by name ({layer} and {expert} still in it)."""

    @abstractmethod
    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        """The part of tensor-parallel rank `rank` of `ranks`; names still hold {layer} and {expert}."""


@dataclass(frozen=True, kw_only=True)
class Replicated(Row):
    """Every rank holds the whole tensor (norms, routers)."""

    of: str
    shape: tuple[str, ...]

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        return {self.of: sizes.shape(self.shape)}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        shape = sizes.shape(self.shape)
        origin = (0,) * len(shape)
        return LocalTensor(self.names[0], shape, (Box(self.of, origin, origin, shape),))


@dataclass(frozen=True, kw_only=True)
class Rows(Row):
    """Split by rows in rank order (embeddings and output layers); pads="vocab": padded at the end first."""

    of: str
    shape: tuple[str, ...]
    pads: Literal["vocab"] | None = None

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        return {self.of: sizes.shape(self.shape)}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        rows = sizes.shape(self.shape)[0]
        return self.of_padded(sizes, padded(rows, ranks) if self.pads else rows, rank, ranks)

    def of_padded(self, sizes: Sizes, total: int, rank: int, ranks: int) -> LocalTensor:
        """The part of a rank where all ranks together have `total` rows, padding included."""
        rows, *rest = sizes.shape(self.shape)
        return split_rows(self.names[0], [(self.of, 0, rows)], total, tuple(rest), rank, ranks)


@dataclass(frozen=True, kw_only=True)
class Columns(Row):
    """Split by columns in rank order (row-parallel linear layers)."""

    of: str
    shape: tuple[str, str]

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        return {self.of: sizes.shape(self.shape)}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        rows, columns = sizes.shape(self.shape)
        width = share(columns, ranks, self.names[0])
        box = Box(self.of, (0, rank * width), (0, 0), (rows, width))
        return LocalTensor(self.names[0], (rows, width), (box,))


@dataclass(frozen=True, kw_only=True)
class Qkv(Row):
    """Query, key and value in one tensor, interleaved by query group: q q q k v | q q q k v | ..., then split by rows.

    rest: the axes after the first: ("hidden",) for weights, () for biases.
    Where ranks outnumber the groups a rank's rows may end inside a group: Megatron gathers the activations then.
    """

    q: str
    k: str
    v: str
    rest: tuple[str, ...] = ()

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        rest = sizes.shape(self.rest)
        return {self.q: (sizes.query, *rest), self.k: (sizes.key, *rest), self.v: (sizes.key, *rest)}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        head, group = sizes.head_dim, sizes.query // sizes.kv_heads  # rows of one key head, of one group's query heads
        pieces = []
        for number in range(sizes.kv_heads):
            pieces += [(self.q, number * group, group), (self.k, number * head, head), (self.v, number * head, head)]
        return split_rows(self.names[0], pieces, sizes.query + 2 * sizes.key, sizes.shape(self.rest), rank, ranks)


@dataclass(frozen=True, kw_only=True)
class Stacked(Row):
    """Tensors of one shape, each split by rows, a rank's parts below one another (gate over up)."""

    of: tuple[str, ...]
    shape: tuple[str, ...]

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        return {name: sizes.shape(self.shape) for name in self.of}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        rows, *rest = sizes.shape(self.shape)
        height = share(rows, ranks, self.names[0])
        origin = (0,) * len(rest)
        boxes = tuple(
            Box(name, (rank * height, *origin), (number * height, *origin), (height, *rest))
            for number, name in enumerate(self.of)
        )
        return LocalTensor(self.names[0], (len(self.of) * height, *rest), boxes)


@dataclass(frozen=True)
class Tie:
    """The output layer is the embedding: one Hugging Face tensor; a last stage without embedding holds a Megatron copy.

    megatron: the copy, read from `to` (a Megatron name in the same table) and never written out.
    """

    megatron: str
    to: str


def padded(vocab: int, tp: int) -> int:
    """Vocabulary rounded up so that every rank has equally many entries, and a multiple of 8 of them.

    8 keeps the output layer's matrix on tensor cores. No more than that: the real configurations then need no padding,
    and a checkpoint of one tp is read at another without resizing.
    """
    multiple = 8 * tp
    return -(-vocab // multiple) * multiple


def share(total: int, ranks: int, name: str) -> int:
    """An equal part of `total`; raises MegagentError if there is none."""
    if total % ranks:
        raise MegagentError(
            f"{name}: {total} does not split over {ranks} tensor-parallel ranks; use a tp that divides it"
        )
    return total // ranks


def split_rows(
    name: str, pieces: Iterable[tuple[str, int, int]], total: int, rest: Shape, rank: int, ranks: int
) -> LocalTensor:
    """A rank's equal share of the rows of a tensor made of pieces (hf name, first row there, rows) and then padding."""
    height = share(total, ranks, name)
    low, high = rank * height, (rank + 1) * height
    origin = (0,) * len(rest)
    boxes = []
    position = 0
    for hf, hf_row, rows in pieces:
        start, stop = max(low, position), min(high, position + rows)
        if start < stop:
            hf_start = (hf_row + start - position, *origin)
            boxes.append(Box(hf, hf_start, (start - low, *origin), (stop - start, *rest)))
        position += rows
    filled = min(max(position - low, 0), height)
    padding = (Region((filled, *origin), (height - filled, *rest)),) if filled < height else ()
    return LocalTensor(name, (height, *rest), tuple(boxes), padding)
