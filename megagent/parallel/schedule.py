"""Micro-batches of a StepBatch, and Megatron's pipeline schedules over them.

A micro-batch is right-padded to its own longest row; causal attention never sees padding from a real token, so no mask
is needed. With trainer.pack_rows its rows lie end to end instead, and attention is told where each begins. Only the
positions that predict a wanted token get logits, and what comes out is one value for each of them, in the order of the
rows: the values of a Jagged column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import functional

from megagent.batch import Jagged, StepBatch
from megagent.errors import BatchError
from megagent.parallel import platform
from megagent.parallel.log_probs import Scoring
from megagent.parallel.model import Stage
from megagent.parallel.output import Question


@dataclass(frozen=True)
class MicroBatch:
    """Some rows, ready for the model, on its device.

    tokens, positions: [rows, length] int64, right-padded with 0, or [1, all tokens] with `packed`, which says where
    each row begins. n tokens are predicted:
    selected: [n] int64, position x rows + row, from where each is predicted; targets: [n] int64, what they are;
    columns: [n] each, values that go with the targets.
    """

    tokens: Tensor
    positions: Tensor
    selected: Tensor
    targets: Tensor
    columns: dict[str, Tensor]
    packed: PackedSeqParams | None = None


@dataclass(frozen=True)
class Sequences:
    """Prompts followed by responses, and which of their tokens are to be predicted.

    tokens: Jagged int64, all of a row; wanted: Jagged bool, its first token never; columns: name -> Jagged like tokens.
    """

    tokens: Jagged
    wanted: Jagged
    columns: dict[str, Jagged]

    def __len__(self) -> int:
        return len(self.tokens)

    def micro_batch(self, rows: Tensor, length_multiple: int = 1, packs: bool = False) -> MicroBatch:
        """The rows at these indices [rows]. If they have nothing to predict, one token is, with zeros for columns.

        Without any, a collective over the vocabulary would be asked to move nothing, which not every backend can.
        length_multiple: rows are padded to a multiple of it. packs: the rows lie end to end, and all of them together
        are filled up to a multiple. No rows at all: one, of which nothing counts.
        """
        absent = len(rows) == 0
        rows = torch.zeros(1, dtype=torch.int64) if absent else rows
        tokens = self.tokens.take(rows)
        wanted = self.wanted.take(rows).values
        idle = absent or not bool(wanted.any())
        place = torch.arange(tokens.tokens) - torch.repeat_interleave(
            tokens.offsets[:-1], tokens.lengths, output_size=tokens.tokens
        )
        if idle:
            wanted = torch.zeros_like(wanted)
            wanted[1] = True
        columns = {name: column.take(rows).values[wanted] for name, column in self.columns.items()}
        if idle:
            columns = {name: torch.zeros_like(column) for name, column in columns.items()}
        if packs:
            lengths = tokens.lengths
            if fill := -tokens.tokens % length_multiple:
                lengths = torch.cat([lengths, torch.tensor([fill])])  # one more row, of which nothing counts
            laid = functional.pad(tokens.values, (0, fill))[None]
            begins = functional.pad(lengths.cumsum(0), (1, 0))
            positions = torch.arange(laid.shape[1]) - torch.repeat_interleave(begins[:-1], lengths)
            positions, selected = positions[None], torch.nonzero(wanted).reshape(-1) - 1
        else:
            laid = tokens.padded(0)
            laid = functional.pad(laid, (0, -laid.shape[1] % length_multiple))
            positions = torch.arange(laid.shape[1]).expand_as(laid)
            selected = (place[wanted] - 1) * len(rows) + tokens.row_of_token[wanted]
        here = platform.current()
        return MicroBatch(
            tokens=here.to_device(laid),
            positions=here.to_device(positions),
            selected=here.to_device(selected),
            targets=here.to_device(tokens.values[wanted]),
            columns={name: here.to_device(column) for name, column in columns.items()},
            packed=_packed(here.to_device(begins.to(torch.int32)), int(lengths.max())) if packs else None,
        )


def _packed(begins: Tensor, longest: int) -> PackedSeqParams:
    """What Megatron's attention and rotary embedding want to know. begins: [rows + 1] int32, from 0 to all tokens."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=begins,
        cu_seqlens_kv=begins,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def response_sequences(batch: StepBatch, columns: Sequence[str] = (), mask: str | None = None) -> Sequences:
    """Prompts and responses of a batch, every response token wanted (or those where column `mask` is not 0).

    columns: Jagged columns over the responses. Raises BatchError for an empty prompt: nothing predicts its first token.
    """
    batch.require("prompts", "responses", *columns, *([mask] if mask else []))
    prompts, responses = batch["prompts"], batch["responses"]
    tokens, after = _joined(prompts, responses)
    wanted = torch.zeros(tokens.tokens, dtype=torch.bool)
    wanted[after] = True if mask is None else batch[mask].values != 0
    spread = {}
    for name in columns:
        values = batch[name].values
        spread[name] = tokens.like(values.new_zeros(tokens.tokens).index_copy_(0, after, values))
    return Sequences(tokens, tokens.like(wanted), spread)


def weighted_sequences(batch: StepBatch) -> Sequences:
    """Prompts and responses with the column loss_weights, over both; tokens of weight 0 are not predicted."""
    batch.require("prompts", "responses", "loss_weights")
    tokens, _ = _joined(batch["prompts"], batch["responses"])
    weights: Jagged = batch["loss_weights"]
    if not torch.equal(weights.lengths, tokens.lengths):
        raise BatchError("loss_weights must have one value for each token of prompt and response, in that order")
    wanted = weights.values != 0
    wanted[tokens.offsets[:-1]] = False  # nothing predicts the first token of a row
    return Sequences(tokens, tokens.like(wanted), {"loss_weights": weights})


def _joined(prompts: Jagged, responses: Jagged) -> tuple[Jagged, Tensor]:
    """Rows of both end to end, and where the response tokens are in the values [response tokens]."""
    if len(prompts) and (int(prompts.lengths.min()) < 1 or int((prompts.lengths + responses.lengths).min()) < 2):
        raise BatchError("a row needs at least one prompt token and two tokens in all; drop the empty rows")
    lengths = prompts.lengths + responses.lengths
    values = prompts.values.new_empty(int(lengths.sum()))
    tokens = Jagged(values, lengths)
    before = _places(tokens.offsets[:-1], prompts)
    after = _places(tokens.offsets[:-1] + prompts.lengths, responses)
    values[before] = prompts.values
    values[after] = responses.values
    return tokens, after


def _places(starts: Tensor, part: Jagged) -> Tensor:
    """[tokens of part] int64: where they lie if row i of part begins at starts[i]."""
    shift = torch.repeat_interleave(starts - part.offsets[:-1], part.lengths, output_size=part.tokens)
    return shift + torch.arange(part.tokens)


def by_length(sequences: Sequences, rows: Tensor, micro_batch_rows: int, multiple: int = 1) -> list[Tensor]:
    """Cut row indices [n] into micro-batches of similar lengths, longest first, where their order does not matter.

    The longest come first so that a run that does not fit into memory fails at once. The number of micro-batches is a
    multiple of `multiple`, as the interleaved schedule wants it: if need be, smaller ones or even some without a row.
    """
    order = rows[torch.argsort(sequences.tokens.lengths[rows], descending=True, stable=True)]
    count = -(-len(order) // micro_batch_rows)
    if not count:
        return []
    if count % multiple == 0:
        return list(torch.split(order, micro_batch_rows))
    return list(torch.tensor_split(order, count + -count % multiple))


LossFunction = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]


def run(
    stage: Stage,
    sequences: Sequences,
    cut: Sequence[Tensor],
    loss: LossFunction,
    forward_only: bool,
    scoring: Scoring | None = None,
) -> list[dict[str, Tensor]]:
    """Megatron's schedule over micro-batches; gradients are left in the data-parallel buffers, reduced.

    cut: row indices of each micro-batch. loss(micro_batch, answer) gives a scalar, whose sum over all micro-batches and
    replicas is minimised, and whatever is to be returned; it runs on the last pipeline stage. Its answer is what the
    output layer says of the n wanted tokens: log-prob and entropy [n, 2] as `scoring` has it, logits
    [n, vocabulary / tp] without, values [n, 1] of a value model.
    Returns one dict a micro-batch, in the order of `cut`, on the last stage; an empty list on others.
    """
    if not cut:
        raise BatchError("no rows to run the model on; give every data-parallel replica at least one")
    if not forward_only:
        for chunk in stage.wrapped:
            chunk.zero_grad_buffer()

    def forward_step(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        micro_batch = next(data)
        stage.ask(Question(micro_batch.selected, micro_batch.targets, scoring))
        output = model(micro_batch.tokens, micro_batch.positions, None, packed_seq_params=micro_batch.packed)
        return output, partial(_loss_of_output, micro_batch, loss)

    data = [_made(sequences, cut, stage) for _ in stage.wrapped]  # every chunk goes through all of it
    schedule = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        return schedule(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=stage.wrapped if len(stage.wrapped) > 1 else stage.wrapped[0],
            num_microbatches=len(cut),
            # Shapes are told from stage to stage (variable_seq_lengths); these two are not read then.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _made(sequences: Sequences, cut: Iterable[Tensor], stage: Stage) -> Iterator[MicroBatch]:
    return (sequences.micro_batch(rows, stage.length_multiple, stage.packs) for rows in cut)


def _loss_of_output(
    micro_batch: MicroBatch, loss: LossFunction, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    value, results = loss(micro_batch, output[0])
    # Megatron counts tokens to divide the gradients by; it is told of none and does not (see model.py).
    return value, torch.zeros((), dtype=torch.int, device=output.device), results
