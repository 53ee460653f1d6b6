"""What a weight family is: a table of rows, which know the boxes of Hugging Face tensors on each tensor-parallel rank.

Everything here is integers and names: no torch, no processes, no weights. Import, export and the transfer of weights to
the rollout engine all follow from the same boxes, so a row that is right for one of them is right for all.

Names: a Megatron name holds the global number of its layer ("decoder.layers.27...", counted over all pipeline stages);
a table writes it as {layer}. Shapes in a table are names of sizes, see `Sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megagent.errors import MegagentError

Shape = tuple[int, ...]
Stage = Literal["first", "layer", "last"]  # of the pipeline: where a tensor lives


@dataclass(frozen=True, slots=True)
class Region:
    """An axis-aligned part of one tensor: `shape` elements from `start` on."""

    start: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Box:
    """A part that a Hugging Face tensor and a local one share: `shape` elements, there from `hf_start`, here from
    `local_start` on."""

    hf: str
    hf_start: Shape
    local_start: Shape
    shape: Shape

    @property
    def hf_slices(self) -> tuple[slice, ...]:
        return Region(self.hf_start, self.shape).slices

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return Region(self.local_start, self.shape).slices


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One Megatron tensor on one tensor-parallel rank: boxes and padding together cover each element exactly once."""

    name: str
    shape: Shape
    boxes: tuple[Box, ...]
    padding: tuple[Region, ...] = ()  # elements that exist nowhere else: zeros


@dataclass(frozen=True)
class Sizes:
    """The integers that a table's shapes are made of. Field names are what a table may write in a shape."""

    layers: int
    vocab: int
    hidden: int
    ffn: int
    heads: int  # query heads
    kv_heads: int  # key/value heads, each with its group of heads / kv_heads query heads
    head_dim: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    def shape(self, names: Iterable[str]) -> Shape:
        return tuple(getattr(self, name) for name in names)

    def problems(self, tp: int) -> list[str]:
        """Every reason why tp ranks cannot split tensors of these sizes, each with the fix; empty if they can."""
        found = []
        for value, what in ((self.heads, "attention heads"), (self.ffn, "feed-forward columns")):
            if value % tp:
                found.append(f"parallel.tp={tp} does not divide the {value} {what}; use a tp that does")
        # Fewer key/value heads than ranks is fine for Megatron, which then shares a group between tp / kv_heads ranks.
        if self.kv_heads % tp and tp % self.kv_heads:
            found.append(
                f"parallel.tp={tp} neither divides the {self.kv_heads} key/value heads nor is a multiple of them; "
                "use a tp that is one or the other"
            )
        elif (self.query + 2 * self.key) % tp:
            found.append(
                f"parallel.tp={tp} does not divide the {self.query + 2 * self.key} rows of q, k and v together; "
                "use a tp that does"
            )
        return found


@dataclass(frozen=True)
class Row:
    """Base of the kinds of rows. `megatron` is the tensor's name, or its names where layer specs differ in it.

    at: the pipeline stage that holds the tensor; every stage holds the {layer} tensors of its own layers.
    """

    megatron: str | tuple[str, ...]
    at: Stage = "layer"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        """Shape of each Hugging Face tensor that this row is made of, by name ({layer} still in it)."""
        raise NotImplementedError

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        """The part of tensor-parallel rank `rank` of `ranks`; names still hold {layer}."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Replicated(Row):
    """Every rank holds the whole tensor (norms)."""

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
    """Split by rows in rank order (column-parallel layers, embeddings); pads="vocab": padded at the end first."""

    of: str
    shape: tuple[str, ...]
    pads: Literal["vocab"] | None = None

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        return {self.of: sizes.shape(self.shape)}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        rows, *rest = sizes.shape(self.shape)
        total = padded(rows, ranks) if self.pads else rows
        return _split_rows(self.names[0], [(self.of, 0, rows)], total, tuple(rest), rank, ranks)


@dataclass(frozen=True, kw_only=True)
class Columns(Row):
    """Split by columns in rank order (row-parallel linear layers)."""

    of: str
    shape: tuple[str, str]

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        return {self.of: sizes.shape(self.shape)}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        rows, columns = sizes.shape(self.shape)
        width = _share(columns, ranks, self.names[0])
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
        return _split_rows(self.names[0], pieces, sizes.query + 2 * sizes.key, sizes.shape(self.rest), rank, ranks)


@dataclass(frozen=True, kw_only=True)
class Stacked(Row):
    """Tensors of one shape, each split by rows, a rank's parts below one another (gate over up)."""

    of: tuple[str, ...]
    shape: tuple[str, ...]

    def hf_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        return {name: sizes.shape(self.shape) for name in self.of}

    def local(self, sizes: Sizes, rank: int, ranks: int) -> LocalTensor:
        rows, *rest = sizes.shape(self.shape)
        height = _share(rows, ranks, self.names[0])
        origin = (0,) * len(rest)
        boxes = tuple(
            Box(name, (rank * height, *origin), (number * height, *origin), (height, *rest))
            for number, name in enumerate(self.of)
        )
        return LocalTensor(self.names[0], (len(self.of) * height, *rest), boxes)


@dataclass(frozen=True)
class Tie:
    """The output layer is the embedding: one Hugging Face tensor; a last stage without embedding holds a Megatron copy.

    megatron: the copy, read from `to` (a Megatron name in the same table) and never written out;
    when: the key of config.json that says so.
    """

    megatron: str
    to: str
    when: str


@dataclass(frozen=True)
class Family:
    """One immutable table. `tensors` in the order of a forward pass; functions translate a Hugging Face config."""

    name: str
    architectures: tuple[str, ...]  # as in config.json
    tensors: tuple[Row, ...]
    ties: Tie | None
    read_sizes: Callable[[Mapping[str, Any]], Sizes]
    config_problems: Callable[[Mapping[str, Any]], list[str]]
    read_transformer_kwargs: Callable[[Mapping[str, Any]], dict[str, Any]]
    read_rotary_base: Callable[[Mapping[str, Any]], float]

    def check(self, hf_config: Mapping[str, Any]) -> None:
        """Raises MegagentError with everything in the config that this family cannot express."""
        problems = self.config_problems(hf_config)
        if problems:
            lines = "".join(f"\n  {problem}" for problem in problems)
            raise MegagentError(f"config.json of a {self.name} model: {_count(problems, 'problem')}{lines}")

    def sizes(self, hf_config: Mapping[str, Any]) -> Sizes:
        """The sizes of the model that `hf_config` describes; raises MegagentError if it is not one of this family."""
        self.check(hf_config)
        return self.read_sizes(hf_config)

    def tied(self, hf_config: Mapping[str, Any]) -> bool:
        """Whether the output layer is the embedding."""
        return self.ties is not None and bool(hf_config.get(self.ties.when, False))

    def transformer_kwargs(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig that say what the model is (not how it runs: no tp, pp, dtype)."""
        sizes = self.sizes(hf_config)
        return {
            "num_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "ffn_hidden_size": sizes.ffn,
            "num_attention_heads": sizes.heads,
            "num_query_groups": sizes.kv_heads,
            "kv_channels": sizes.head_dim,
            **self.read_transformer_kwargs(hf_config),
        }

    def gpt_kwargs(self, hf_config: Mapping[str, Any], tp: int) -> dict[str, Any]:
        """Arguments of Megatron's GPTModel that say what the model is."""
        return {
            "vocab_size": self.padded_vocab(hf_config, tp),
            "max_sequence_length": int(hf_config["max_position_embeddings"]),
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "rotary_base": self.read_rotary_base(hf_config),
            "share_embeddings_and_output_weights": self.tied(hf_config),
        }

    def padded_vocab(self, hf_config: Mapping[str, Any], tp: int) -> int:
        """Vocabulary entries over all tensor-parallel ranks, with those that only fill up the last rank(s)."""
        return padded(self.sizes(hf_config).vocab, tp)

    def problems(self, hf_config: Mapping[str, Any], tp: int, pp: int) -> list[str]:
        """Every reason why tp x pp ranks cannot hold this model, each with the fix; empty if they can."""
        sizes = self.sizes(hf_config)
        found = sizes.problems(tp)
        each, more = divmod(sizes.layers, pp)
        if more > each:
            found.append(
                f"parallel.pp={pp} cuts the {sizes.layers} layers into {pp - 1} stages of {each} and a first one of "
                f"{each + more}, more than twice as many; use a pp that divides them better"
            )
        return found

    def first_stage_layers(self, hf_config: Mapping[str, Any], pp: int) -> int | None:
        """Layers of the first of pp stages where they do not divide: it takes those that are left over. Else None."""
        layers = self.sizes(hf_config).layers
        return None if layers % pp == 0 else layers // pp + layers % pp

    def hf_shapes(self, hf_config: Mapping[str, Any]) -> dict[str, Shape]:
        """Shape of every Hugging Face tensor of the model, by name; a tied output layer is not one."""
        sizes = self.sizes(hf_config)
        shapes: dict[str, Shape] = {}
        for row, layer in self._rows(hf_config):
            shapes |= {_numbered(name, layer): shape for name, shape in row.hf_shapes(sizes).items()}
        return shapes

    def tied_hf_names(self, hf_config: Mapping[str, Any]) -> dict[str, str]:
        """Hugging Face names that a checkpoint may carry although they are ties -> the name that they must equal."""
        if self.ties is None or not self.tied(hf_config):
            return {}
        sizes = self.sizes(hf_config)
        copies = self.row(self.ties.megatron).hf_shapes(sizes)
        originals = self.row(self.ties.to).hf_shapes(sizes)
        return dict(zip(copies, originals, strict=True))

    def megatron_names(self, hf_config: Mapping[str, Any]) -> list[str]:
        """Canonical global names of the model's tensors, each once, in the table's order (a tie's copy is not one)."""
        return [_numbered(row.names[0], layer) for row, layer in self._rows(hf_config)]

    def stage_names(self, hf_config: Mapping[str, Any], layers: Iterable[int], first: bool, last: bool) -> list[str]:
        """Canonical global names on one pipeline stage (or one of its chunks) with these global layers."""
        own = set(layers)
        found = []
        for row, layer in self._rows(hf_config):
            if (row.at == "layer" and layer in own) or (row.at == "first" and first) or (row.at == "last" and last):
                found.append(_numbered(row.names[0], layer))
        if self.ties is not None and self.tied(hf_config) and last and not first:
            found.append(self.ties.megatron)
        return found

    def canonical(self, megatron_name: str) -> str | None:
        """The canonical one of a tensor's global names, None if the table has no such tensor."""
        template, layer = split_layer(megatron_name)
        row = self._rows_by_name.get(template)
        return None if row is None else _numbered(row.names[0], layer)

    def local(self, hf_config: Mapping[str, Any], megatron_name: str, rank: int, ranks: int) -> LocalTensor:
        """One tensor, by any of its global names, on rank `rank` of `ranks`; a tie's copy consists of the original."""
        sizes = self.sizes(hf_config)
        if problems := sizes.problems(ranks):
            raise MegagentError("; ".join(problems))
        template, layer = split_layer(megatron_name)
        row = self.row(template)
        if self.ties is not None and self.tied(hf_config) and template == self.ties.megatron:
            row = self.row(self.ties.to)
        tensor = row.local(sizes, rank, ranks)
        boxes = tuple(Box(_numbered(box.hf, layer), box.hf_start, box.local_start, box.shape) for box in tensor.boxes)
        return LocalTensor(megatron_name, tensor.shape, boxes, tensor.padding)

    def row(self, template: str) -> Row:
        """The row of a Megatron name with {layer} in it; raises KeyError."""
        return self._rows_by_name[template]

    def _rows(self, hf_config: Mapping[str, Any]) -> Iterator[tuple[Row, int]]:
        """Rows of the model with the global layer of each (0 for rows that are in no layer), in the table's order."""
        per_layer = [row for row in self.tensors if row.at == "layer"]
        for row in self.tensors:
            if row.at == "first":
                yield row, 0
        for layer in range(self.sizes(hf_config).layers):
            for row in per_layer:
                yield row, layer
        for row in self.tensors:
            copied = self.ties is not None and self.tied(hf_config) and self.ties.megatron in row.names
            if row.at == "last" and not copied:
                yield row, 0

    @cached_property
    def _rows_by_name(self) -> dict[str, Row]:
        return {name: row for row in self.tensors for name in row.names}


def padded(vocab: int, tp: int) -> int:
    """Vocabulary rounded up so that every rank has equally many entries, and a multiple of 8 of them.

    8 keeps the output layer's matrix on tensor cores. No more than that: the real configurations then need no padding,
    and a checkpoint of one tp is read at another without resizing.
    """
    multiple = 8 * tp
    return -(-vocab // multiple) * multiple


def split_layer(megatron_name: str) -> tuple[str, int]:
    """ "decoder.layers.7.mlp.x" -> ("decoder.layers.{layer}.mlp.x", 7); a name without a layer -> (itself, 0)."""
    head, found, rest = megatron_name.partition("decoder.layers.")
    number, dot, tail = rest.partition(".")
    if not found or not number.isdecimal():
        return megatron_name, 0
    return f"{head}{found}{{layer}}{dot}{tail}", int(number)


def _numbered(name: str, layer: int) -> str:
    return name.replace("{layer}", str(layer))


def _share(total: int, ranks: int, name: str) -> int:
    if total % ranks:
        raise MegagentError(
            f"{name}: {total} does not split over {ranks} tensor-parallel ranks; use a tp that divides it"
        )
    return total // ranks


def _split_rows(
    name: str, pieces: Iterable[tuple[str, int, int]], total: int, rest: Shape, rank: int, ranks: int
) -> LocalTensor:
    """A rank's equal share of the rows of a tensor made of pieces (hf name, first row there, rows) and then padding."""
    height = _share(total, ranks, name)
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


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
