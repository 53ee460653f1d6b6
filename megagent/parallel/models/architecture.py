"""What a model is, whatever its weights: sizes, the maths, and the table of its tensors. One immutable object.

An Architecture comes from a config.json (`models.architecture_of`) and answers everything that import, export, the
Megatron model and the transfer of weights ask: which tensors there are, on which rank, made of which boxes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from megagent.errors import ConfigError, MegagentError
from megagent.parallel.degrees import Chunk, Degrees, Place
from megagent.parallel.models.rows import Row, Tie, padded
from megagent.parallel.reshard.boxes import Box, LocalTensor, Shape

FLOATS = ("BF16", "F16", "F32", "F64")  # the dtypes that weights may have, as safetensors writes them
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. factor: of Llama 3's scaling to longer contexts, None without it."""

    theta: float
    factor: float | None = None

    # The parameters of Llama 3's scaling that Megatron has fixed.
    LLAMA3: ClassVar[Mapping[str, float]] = MappingProxyType(
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    )


@dataclass(frozen=True)
class Experts:
    """A mixture in every layer. per_token: experts that a token visits; ffn: width of one.

    renormalised: the weights of a token's experts sum to 1. aux_loss: coefficient of the load-balancing loss, or 0.
    """

    count: int
    per_token: int
    ffn: int
    renormalised: bool
    aux_loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model of a family. Integers are what a table may write in a shape, flags what a row may depend on.

    family: name of the family; tensors: its table, in the order of a forward pass.
    """

    family: str
    tensors: tuple[Row, ...]
    ties: Tie
    layers: int
    vocab: int
    hidden: int
    ffn: int
    heads: int  # query heads
    kv_heads: int  # key/value heads, each with its group of heads / kv_heads query heads
    head_dim: int
    positions: int  # longest sequence
    norm_eps: float
    rope: Rope
    tied: bool  # the output layer is the embedding
    init_std: float = 0.02
    qkv_bias: bool = False
    linear_bias: bool = False  # of every other linear layer
    qk_norm: bool = False
    experts: Experts | None = None

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def expert_count(self) -> int:
        return self.experts.count if self.experts else 0

    @property
    def expert_ffn(self) -> int:
        return self.experts.ffn if self.experts else 0

    def shape(self, names: Iterable[str]) -> Shape:
        return tuple(getattr(self, name) for name in names)

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary entries over all tensor-parallel ranks, with those that only fill up the last rank(s)."""
        return padded(self.vocab, tp)

    # --- Megatron ----------------------------------------------------------------------------------------------------

    def transformer_kwargs(self) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig that say what the model is (not how it runs: no tp, pp, dtype)."""
        from torch.nn import functional  # only here: everything else about an architecture is integers and names

        kwargs: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_query_groups": self.kv_heads,
            "kv_channels": self.head_dim,
            "add_bias_linear": self.linear_bias,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "gated_linear_unit": True,
            "activation_func": functional.silu,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_eps,
            "init_method_std": self.init_std,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        if self.experts is not None:
            kwargs |= {
                "num_moe_experts": self.experts.count,
                "moe_router_topk": self.experts.per_token,
                "moe_ffn_hidden_size": self.experts.ffn,
                # Softmax over the chosen experts only is softmax over all, renormalised.
                "moe_router_pre_softmax": not self.experts.renormalised,
                "moe_router_score_function": "softmax",
                "moe_router_dtype": "fp32",
                "moe_router_load_balancing_type": "aux_loss" if self.experts.aux_loss else "none",
                "moe_aux_loss_coeff": self.experts.aux_loss,
            }
        return kwargs

    def gpt_kwargs(self, tp: int) -> dict[str, Any]:
        """Arguments of Megatron's GPTModel that say what the model is."""
        kwargs: dict[str, Any] = {
            "vocab_size": self.padded_vocab(tp),
            "max_sequence_length": self.positions,
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "rotary_base": self.rope.theta,
            "share_embeddings_and_output_weights": self.tied,
        }
        if self.rope.factor is not None:
            kwargs |= {"rope_scaling": True, "rope_scaling_factor": self.rope.factor}
        return kwargs

    def stages(self, degrees: Degrees) -> tuple[Chunk, ...]:
        """The chunks of all pipeline stages in the model's order: their layers, and which ends of the model."""
        return degrees.chunks(self.layers)

    def problems(self, degrees: Degrees) -> list[str]:
        """Every reason why these degrees cannot hold this model, each with the fix; empty if they can."""
        if found := degrees.problems():
            return found
        tp = degrees.tp
        dense = [] if self.experts else [(self.ffn, "feed-forward columns")]
        for value, what in ((self.heads, "attention heads"), *dense):
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
        return found + self._expert_problems(degrees) + degrees.chunk_problems(self.layers)

    def _expert_problems(self, degrees: Degrees) -> list[str]:
        if self.experts is None:
            given = {"ep": degrees.ep, "etp": degrees.expert_tp if degrees.etp is not None else 1}
            return [
                f"parallel.{name}={value} splits experts and {self.family} models have none; leave it out"
                for name, value in given.items()
                if value > 1 and not (name == "etp" and value == degrees.tp)
            ]
        found = []
        if self.experts.count % degrees.ep:
            found.append(
                f"parallel.ep={degrees.ep} does not divide the {self.experts.count} experts; use an ep that does"
            )
        if self.experts.ffn % degrees.expert_tp:
            found.append(
                f"parallel.etp={degrees.expert_tp} does not divide the {self.experts.ffn} feed-forward columns of an "
                "expert; use an etp that does"
            )
        return found

    def require(self, degrees: Degrees) -> None:
        """Raises ConfigError with all `problems`."""
        if problems := self.problems(degrees):
            raise ConfigError(problems, source=f"{self.family} model")

    # --- tensors -----------------------------------------------------------------------------------------------------

    def hf_shapes(self) -> dict[str, Shape]:
        """Shape of every Hugging Face tensor of the model, by name; a tied output layer is not one."""
        shapes: dict[str, Shape] = {}
        for row, layer, expert in self._model_rows():
            shapes |= {_numbered(name, layer, expert): shape for name, shape in row.hf_shapes(self).items()}
        return shapes

    def tied_hf_names(self) -> dict[str, str]:
        """Hugging Face names that a checkpoint may carry although they are ties -> the name that they must equal."""
        if not self.tied:
            return {}
        copies = self.row(self.ties.megatron).hf_shapes(self)
        originals = self.row(self.ties.to).hf_shapes(self)
        return dict(zip(copies, originals, strict=True))

    def hf_problems(self, held: Mapping[str, tuple[str, Shape]], all_seen: bool = True) -> list[str]:
        """Every difference between the Hugging Face tensors of a checkpoint and those of the model; empty if none.

        held: name -> (dtype as safetensors writes it, shape); a tie's copy may be among them. all_seen: whether there
        are no others; else none is called missing.
        """
        shapes, ties = self.hf_shapes(), self.tied_hf_names()
        found = [f"missing {name} {list(shape)}" for name, shape in shapes.items() if all_seen and name not in held]
        for name, (dtype, shape) in held.items():
            wanted = shapes.get(ties.get(name, name))
            if wanted is None:
                found.append(f"unexpected {name} {dtype} {list(shape)}")
            elif shape != wanted:
                found.append(f"{name} is {list(shape)} and should be {list(wanted)}")
            elif dtype not in FLOATS:
                found.append(f"{name} is {dtype} and should be one of {', '.join(FLOATS)}")
        return found

    def megatron_names(self) -> list[str]:
        """Canonical names of the model's Megatron tensors, each once, in the table's order, without a tie's copy."""
        return [_numbered(row.names[0], layer, expert) for row, layer, expert in self._model_rows()]

    def chunk_names(self, chunk: Chunk, experts: range | None = None) -> list[str]:
        """Canonical names of the tensors of one chunk of the pipeline, with these global experts; None: with all."""
        experts = range(self.expert_count) if experts is None else experts
        found = []
        if chunk.has_embedding:
            found += [row.names[0] for row in self.rows if row.at == "first"]
        for layer in chunk.layers:
            for row in self.rows:
                if row.at == "layer":
                    numbers = experts if row.of_experts else (0,)
                    found += [_numbered(row.names[0], layer, expert) for expert in numbers]
        if chunk.has_output:
            found += [row.names[0] for row in self.rows if row.at == "last" and not self.is_copy(row)]
            if self.tied and not chunk.has_embedding:
                found.append(self.ties.megatron)
        return found

    def experts_of(self, degrees: Degrees, place: Place) -> range:
        """Global numbers of the experts that a rank has a part of."""
        each = self.expert_count // degrees.ep
        return range(place.ep_rank * each, (place.ep_rank + 1) * each)

    def canonical(self, megatron_name: str, layers: Sequence[int] | None = None, first_expert: int = 0) -> str | None:
        """The canonical global name of a Megatron tensor, None if the table has no such tensor.

        megatron_name: by either layer spec. With `layers` its numbers are local to a chunk of the pipeline, whose
        layers these are, and to a rank, whose experts start at first_expert.
        """
        template, layer, expert = split_name(megatron_name)
        row = self._rows_by_name.get(template)
        if row is None:
            return None
        if layers is not None and "{layer}" in template:
            if layer >= len(layers):
                return None
            layer = layers[layer]
        return _numbered(row.names[0], layer, expert + first_expert)

    def local(self, megatron_name: str, degrees: Degrees, place: Place | None = None) -> LocalTensor:
        """One tensor, by any of its global names, on a rank (the first, unless said)."""
        place = place or degrees.place(0)
        template, layer, expert = split_name(megatron_name)
        row = self._rows_by_name.get(template)
        if row is None or (self.is_copy(row) and not self.tied):
            raise MegagentError(f"{megatron_name} is no tensor of a {self.family} model")
        if row.of_experts:
            return self.part(megatron_name, row, layer, expert, place.etp_rank, degrees.expert_tp)
        return self.part(megatron_name, row, layer, expert, place.tp_rank, degrees.tp)

    def part(self, name: str, row: Row, layer: int, expert: int, rank: int, ranks: int) -> LocalTensor:
        """The part of rank `rank` of `ranks` of a row's tensor, under `name`."""
        tensor = self._part(row, rank, ranks)
        boxes = tuple(
            Box(_numbered(box.hf, layer, expert), box.hf_start, box.local_start, box.shape) for box in tensor.boxes
        )
        return tensor.renamed(name, boxes)

    def row(self, template: str) -> Row:
        """The row of a Megatron name with {layer} and {expert} in it; raises KeyError."""
        return self._rows_by_name[template]

    def is_copy(self, row: Row) -> bool:
        """Whether a row's tensor is the output layer's copy of the embedding."""
        return self.tied and self.ties.megatron in row.names

    def _part(self, row: Row, rank: int, ranks: int) -> LocalTensor:
        """Templates of a rank's tensors; the same for all layers and experts, so they are made once."""
        key = (row.names[0], rank, ranks)
        if key not in self._parts:
            source = self.row(self.ties.to) if self.is_copy(row) else row
            self._parts[key] = replace(source.local(self, rank, ranks), copy=self.is_copy(row))
        return self._parts[key]

    def _model_rows(self) -> Iterator[tuple[Row, int, int]]:
        """Rows of the model with the layer and expert of each (0 where it has none), in the table's order."""
        per_layer = [row for row in self.rows if row.at == "layer"]
        for row in self.rows:
            if row.at == "first":
                yield row, 0, 0
        for layer in range(self.layers):
            for row in per_layer:
                for expert in range(self.expert_count) if row.of_experts else (0,):
                    yield row, layer, expert
        for row in self.rows:
            if row.at == "last" and not self.is_copy(row):
                yield row, 0, 0

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table without the rows that this model has no use for."""
        return tuple(row for row in self.tensors if row.when is None or getattr(self, row.when))

    @cached_property
    def _rows_by_name(self) -> dict[str, Row]:
        return {name: row for row in self.rows for name in row.names}

    @cached_property
    def _parts(self) -> dict[tuple[str, int, int], LocalTensor]:
        return {}


def split_name(megatron_name: str) -> tuple[str, int, int]:
    """ "decoder.layers.7.mlp.x" -> ("decoder.layers.{layer}.mlp.x", 7, 0); experts likewise; 0 where there is none."""
    layer, expert = _LAYER.search(megatron_name), _EXPERT.search(megatron_name)
    template = _LAYER.sub("{layer}", _EXPERT.sub("{expert}", megatron_name, count=1), count=1)
    return template, int(layer[0]) if layer else 0, int(expert[0]) if expert else 0


def _numbered(name: str, layer: int, expert: int) -> str:
    return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
