"""The layout of vLLM's workers: tensor x pipeline parallel, experts by tensor or expert parallel, several engines.

Integers and names, as of vLLM 0.32: nothing of vLLM is imported. Its parameters are made of the same Hugging Face
tensors as Megatron's, so they follow from the rows of the family's table: q, k and v in one tensor, each by its own
heads and key/value heads repeated where they are fewer than the ranks; gate over up; a layer's experts in one tensor of
three axes; the vocabulary padded to a multiple of 64 and then split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megagent.errors import ConfigError
from megagent.parallel.models.architecture import Architecture
from megagent.parallel.models.rows import Columns, Qkv, Replicated, Row, Rows, Stacked
from megagent.parallel.reshard.boxes import Box, LocalTensor, Shape
from megagent.parallel.reshard.layout import Layout

_VOCABULARY_MULTIPLE = 64
# (of the first Hugging Face tensor that it is made of, in vLLM)
_MERGED = (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"))


@dataclass(frozen=True)
class Workers:
    """The workers of some engines: rank = (engine * pp + pp_rank) * tp + tp_rank.

    expert_parallel: an engine's tp ranks hold whole experts, each some of them, instead of a slice of every one.
    """

    tp: int = 1
    pp: int = 1
    engines: int = 1
    expert_parallel: bool = False

    def problems(self, architecture: Architecture) -> list[str]:
        """Every reason why these workers cannot hold the model, each with the fix."""
        tp = self.tp
        ffn = [] if architecture.experts else [(architecture.ffn, "feed-forward columns")]
        if architecture.experts and not self.expert_parallel:
            ffn = [(architecture.experts.ffn, "feed-forward columns of an expert")]
        vocab = _padded_vocab(architecture)
        found = [
            f"rollout.tp={tp} does not divide the {value} {what}; use a tp that does"
            for value, what in ((architecture.heads, "attention heads"), *ffn, (vocab, "padded vocabulary entries"))
            if value % tp
        ]
        if architecture.kv_heads % tp and tp % architecture.kv_heads:
            found.append(
                f"rollout.tp={tp} neither divides the {architecture.kv_heads} key/value heads nor is a multiple of "
                "them; use a tp that is one or the other"
            )
        if architecture.experts and self.expert_parallel and tp > architecture.experts.count:
            found.append(f"rollout.tp={tp} is more than the {architecture.experts.count} experts; use fewer ranks")
        if self.pp > architecture.layers:
            found.append(f"rollout.pp={self.pp} is more than the {architecture.layers} layers; use fewer stages")
        return found

    def layers(self, architecture: Architecture, pp_rank: int) -> range:
        """Global layers of a stage. vLLM gives those left over to the last stage but one and upwards, one each."""
        each, more = divmod(architecture.layers, self.pp)
        sizes = [each + (self.pp - 1 - more <= number < self.pp - 1) for number in range(self.pp)]
        start = sum(sizes[:pp_rank])
        return range(start, start + sizes[pp_rank])

    def experts(self, architecture: Architecture, tp_rank: int) -> range:
        """Global numbers of the experts on a rank; the first ranks have one more where they do not divide."""
        if not self.expert_parallel:
            return range(architecture.expert_count)
        each, more = divmod(architecture.expert_count, self.tp)
        start = tp_rank * each + min(tp_rank, more)
        return range(start, start + each + (tp_rank < more))


def layout(architecture: Architecture, workers: Workers, dtype: str = "BF16") -> Layout:
    """What all workers hold. Raises ConfigError if they cannot hold the model."""
    if problems := workers.problems(architecture):
        raise ConfigError(problems, source=f"{architecture.family} model in vLLM")
    stages = [
        tuple(replace(tensor, dtype=dtype) for tensor in worker_tensors(architecture, workers, pp_rank, tp_rank))
        for pp_rank in range(workers.pp)
        for tp_rank in range(workers.tp)
    ]
    return Layout(
        f"vLLM tp={workers.tp} pp={workers.pp}",
        {
            engine * len(stages) + number: tensors
            for engine in range(workers.engines)
            for number, tensors in enumerate(stages)
        },
    )


def worker_tensors(architecture: Architecture, workers: Workers, pp_rank: int, tp_rank: int) -> Iterator[LocalTensor]:
    """What one worker holds, by the names of its model's parameters."""
    first, last = pp_rank == 0, pp_rank == workers.pp - 1
    # Its mixture models build embedding, final norm and head on every stage; the dense ones only where they are used,
    # and a tied head is the embedding itself.
    everywhere = architecture.experts is not None
    own = [(row, _tensor(architecture, row, workers, tp_rank)) for row in architecture.rows]
    yield from (
        tensor for row, tensor in own if row.at == "first" and (first or everywhere or (architecture.tied and last))
    )
    for layer in workers.layers(architecture, pp_rank):
        yield from (_of_layer(tensor, layer) for row, tensor in own if row.at == "layer")
    yield from (
        tensor for row, tensor in own if row.at == "last" and (last or everywhere) and not architecture.is_copy(row)
    )


def _tensor(architecture: Architecture, row: Row, workers: Workers, tp_rank: int) -> LocalTensor:
    """A row's tensor; names still hold {layer}."""
    if row.of_experts:
        return _experts(architecture, row, workers, tp_rank)
    match row:
        case Qkv():
            return _qkv(architecture, row, tp_rank, workers.tp)
        case Rows(of=of):
            return replace(row.of_padded(architecture, _padded_vocab(architecture), tp_rank, workers.tp), name=of)
        case Replicated(of=of) | Columns(of=of):
            return replace(row.local(architecture, tp_rank, workers.tp), name=of)
        case Stacked(of=(of, *_)):
            return replace(row.local(architecture, tp_rank, workers.tp), name=_merged(of))
    raise TypeError(f"vLLM's layout does not know {type(row).__name__} rows")


def _qkv(architecture: Architecture, row: Qkv, rank: int, ranks: int) -> LocalTensor:
    rest = architecture.shape(row.rest)
    origin = (0,) * len(rest)
    query, repeats = architecture.query // ranks, max(1, ranks // architecture.kv_heads)
    key = architecture.key * repeats // ranks
    pieces = ((row.q, rank * query, query), *((name, rank // repeats * key, key) for name in (row.k, row.v)))
    boxes, position = [], 0
    for name, start, rows in pieces:
        boxes.append(Box(name, (start, *origin), (position, *origin), (rows, *rest)))
        position += rows
    return LocalTensor(_merged(row.q), (position, *rest), tuple(boxes))


def _experts(architecture: Architecture, row: Row, workers: Workers, rank: int) -> LocalTensor:
    experts = workers.experts(architecture, rank)
    one = row.local(architecture, *((0, 1) if workers.expert_parallel else (rank, workers.tp)))
    boxes = tuple(
        Box(box.hf.replace("{expert}", str(expert)), box.hf_start, (number, *box.local_start), box.shape)
        for number, expert in enumerate(experts)
        for box in one.boxes
    )
    mixture = one.boxes[0].hf.partition(".{expert}")[0]
    part = "w13_weight" if isinstance(row, Stacked) else "w2_weight"
    shape: Shape = (len(experts), *one.shape)
    return LocalTensor(f"{mixture}.routed_experts.{part}", shape, boxes)


def _of_layer(tensor: LocalTensor, layer: int) -> LocalTensor:
    number = str(layer)
    boxes = tuple(
        Box(box.hf.replace("{layer}", number), box.hf_start, box.local_start, box.shape) for box in tensor.boxes
    )
    return tensor.renamed(tensor.name.replace("{layer}", number), boxes)


def _merged(name: str) -> str:
    for part, merged in _MERGED:
        name = name.replace(f".{part}.", f".{merged}.")
    return name


def _padded_vocab(architecture: Architecture) -> int:
    return -(-architecture.vocab // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
