"""The step batch: rows are agent steps (one prompt, one response), columns are per row or per token.

Token columns are `Jagged`: all rows' tokens end to end plus a length per row, so no row is padded to another's length
and a batch is a few large arrays that travel cheaply between processes. Every column of a `StepBatch` has the same
number of rows and moves with the others: taking, concatenating and splitting either move all of them or raise
`BatchError`. A batch never changes in place; `with_columns` gives a new one that shares the old arrays.

Standard columns (a batch holds those that are known so far):
    uid, traj_uid, anchor_obs           [rows] objects: group, episode, observation without history
    step_index                          [rows] int64: place of the step in its episode, from 0
    rewards, episode_rewards            [rows] float32: of this step, and summed over the row's episode
    is_action_valid, is_padding         [rows] bool
    prompts, responses                  Jagged int64
    response_mask                       Jagged over the responses: 1 where the token carries loss
    rollout_log_probs, token_rewards, old_log_probs, ref_log_probs, advantages   Jagged float32 over the responses
    values, value_targets               Jagged float32 over the responses: of a critic, and what they should have been
    returns                             [rows] float32: discounted return of the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagent.errors import BatchError

# Columns with one value per response token. They must have the lengths of `responses`, row by row.
RESPONSE_COLUMNS = (
    "response_mask",
    "rollout_log_probs",
    "token_rewards",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "values",
    "value_targets",
)

Indices = Tensor | np.ndarray | Sequence[int]


class Jagged:
    """Rows of different lengths, end to end in one tensor.

    values: [tokens], any dtype; lengths: [rows] int64, not negative, summing to tokens.
    Raises BatchError if the two do not fit.
    """

    __slots__ = ("_offsets", "lengths", "values")

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        if values.dim() != 1 or lengths.dim() != 1:
            raise BatchError(
                f"jagged values {list(values.shape)} and lengths {list(lengths.shape)} must both have one dimension; "
                "use Jagged.from_list or Jagged.from_padded"
            )
        lengths = lengths.to(device=values.device, dtype=torch.int64)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=values.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        if lengths.numel() and int(lengths.min()) < 0:
            raise BatchError(f"jagged lengths must not be negative, found {int(lengths.min())}")
        if int(offsets[-1]) != values.numel():
            raise BatchError(
                f"jagged lengths sum to {int(offsets[-1])} but there are {values.numel()} values; "
                "give one length per row, summing to the number of values"
            )
        self.values = values
        self.lengths = lengths
        self._offsets = offsets

    @classmethod
    def from_list(cls, rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Jagged:
        """One row per tensor [n_i]. dtype: of the values; the rows' own by default (float32 if there are none)."""
        lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int64)
        values = torch.cat([row.reshape(-1) for row in rows]) if rows else torch.empty(0, dtype=dtype)
        return cls(values if dtype is None else values.to(dtype), lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Jagged:
        """padded: [rows, max_len], right-padded; lengths: [rows], each at most max_len."""
        keep = torch.arange(padded.shape[1], device=padded.device) < lengths.to(padded.device)[:, None]
        return cls(padded[keep], lengths)

    @property
    def offsets(self) -> Tensor:
        """[rows + 1] int64: row i is values[offsets[i] : offsets[i + 1]]."""
        return self._offsets

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def tokens(self) -> int:
        return self.values.numel()

    @property
    def row_of_token(self) -> Tensor:
        """[tokens] int64: the row that each token belongs to."""
        rows = torch.arange(len(self), device=self.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.tokens)

    def __len__(self) -> int:
        return self.lengths.numel()

    def __repr__(self) -> str:
        return f"Jagged(rows={len(self)}, tokens={self.tokens}, dtype={self.dtype})"

    def row(self, index: int) -> Tensor:
        """[n_i], a view. A negative index counts from the end; one out of range raises IndexError."""
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.values[int(self._offsets[index]) : int(self._offsets[index + 1])]

    def rows(self) -> list[Tensor]:
        """Every row [n_i], as views."""
        return list(torch.split(self.values, self.lengths.tolist())) if len(self) else []

    def like(self, values: Tensor) -> Jagged:
        """Other values [tokens] for the same rows."""
        return Jagged(values, self.lengths)

    def spread(self, per_row: Tensor) -> Jagged:
        """per_row: [rows]. Gives each row's value to all of the row's tokens."""
        if per_row.shape != self.lengths.shape:
            raise BatchError(f"spread needs one value per row: got {list(per_row.shape)} for {len(self)} rows")
        return self.like(torch.repeat_interleave(per_row.to(self.device), self.lengths, output_size=self.tokens))

    def sums(self) -> Tensor:
        """[rows]: sum of each row's values, 0 for an empty row. Integers and booleans are summed as int64."""
        if self.dtype.is_floating_point:
            return torch.segment_reduce(self.values, "sum", lengths=self.lengths, unsafe=True, initial=0)
        total = torch.zeros(len(self), dtype=torch.int64, device=self.device)
        return total.index_add_(0, self.row_of_token, self.values.to(torch.int64))

    def to(self, target: torch.dtype | torch.device | str) -> Jagged:
        """The same rows in another dtype or on another device."""
        return Jagged(self.values.to(target), self.lengths)

    def padded(self, pad: float | int | bool, length: int | None = None) -> Tensor:
        """[rows, length], right-padded with `pad`. length: the longest row by default; a shorter one raises."""
        longest = int(self.lengths.max()) if len(self) else 0
        length = longest if length is None else length
        if length < longest:
            raise BatchError(f"rows of {longest} tokens do not fit into {length}; pad to at least {longest}")
        out = self.values.new_full((len(self), length), pad)
        out[torch.arange(length, device=self.device) < self.lengths[:, None]] = self.values
        return out

    def take(self, indices: Indices) -> Jagged:
        """The rows at `indices`, in that order; a row may be taken more than once."""
        index = _row_indices(indices, len(self)).to(self.device)
        lengths = self.lengths[index]
        tokens = int(lengths.sum())
        first = torch.cumsum(lengths, 0) - lengths
        shift = torch.repeat_interleave(self._offsets[index] - first, lengths, output_size=tokens)
        return Jagged(self.values[shift + torch.arange(tokens, device=self.device)], lengths)

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """All rows of all parts, in order. At least one part."""
        if not parts:
            raise BatchError("nothing to concatenate: give at least one part")
        return Jagged(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def split(self, parts: int) -> list[Jagged]:
        """`parts` contiguous pieces of equally many rows, as views."""
        size = _part_size(len(self), parts)
        return [self._slice(start * size, start * size + size) for start in range(parts)]

    def _slice(self, start: int, stop: int) -> Jagged:
        return Jagged(self.values[int(self._offsets[start]) : int(self._offsets[stop])], self.lengths[start:stop])

    def __reduce__(self) -> tuple[Callable[..., Jagged], tuple[Any, ...]]:
        return _restore_jagged, (_portable(self.values), _portable(self.lengths))


Column = Jagged | Tensor | np.ndarray


class StepBatch:
    """Columns that all have the same number of rows.

    columns: name -> Jagged, Tensor [rows, ...] or numpy array of objects [rows].
    Raises BatchError, naming every fault: a column of another length or kind, or a response column (RESPONSE_COLUMNS)
    whose row lengths are not those of `responses`.
    """

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)
        problems = list(_kind_problems(self._columns)) or list(_length_problems(self._columns))
        if problems:
            raise BatchError("step batch: " + "; ".join(problems))
        self._rows = len(next(iter(self._columns.values()))) if self._columns else 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __repr__(self) -> str:
        return f"StepBatch(rows={len(self)}, columns={list(self._columns)})"

    def __getitem__(self, name: str) -> Any:
        """The column; its kind follows from its name, as the module's list says. Unknown: BatchError."""
        try:
            return self._columns[name]
        except KeyError:
            raise BatchError(f"the batch has no column {name!r}; it has {', '.join(self._columns) or 'none'}") from None

    def items(self) -> Iterable[tuple[str, Column]]:
        return self._columns.items()

    def require(self, *names: str) -> None:
        """Raises BatchError with all the names that are missing."""
        missing = [name for name in names if name not in self._columns]
        if missing:
            have = ", ".join(self._columns) or "none"
            raise BatchError(f"the batch lacks the columns {', '.join(missing)}; it has {have}")

    def with_columns(self, **columns: Column) -> StepBatch:
        """A new batch with these columns added or replaced. The others are shared, not copied."""
        return StepBatch({**self._columns, **columns})

    def select(self, *names: str) -> StepBatch:
        """A new batch with these columns only: send a rank what it needs."""
        self.require(*names)
        return StepBatch({name: self._columns[name] for name in names})

    def without(self, *names: str) -> StepBatch:
        """A new batch without these columns."""
        self.require(*names)
        return StepBatch({name: column for name, column in self._columns.items() if name not in names})

    def take(self, indices: Indices) -> StepBatch:
        """The rows at `indices` in that order, or those where a boolean [rows] is true. Rows may repeat."""
        index = _row_indices(indices, len(self))
        return StepBatch({name: _take(column, index) for name, column in self._columns.items()})

    @staticmethod
    def concat(parts: Sequence[StepBatch]) -> StepBatch:
        """All rows of all parts, in order. All parts have the same columns, or BatchError names the differences."""
        if not parts:
            raise BatchError("nothing to concatenate: give at least one batch")
        names = set(parts[0].names)
        for number, part in enumerate(parts):
            if set(part.names) != names:
                differing = ", ".join(sorted(names ^ set(part.names)))
                raise BatchError(f"batch {number} differs from batch 0 in the columns {differing}; give both the same")
        return StepBatch({name: _concat(name, [part[name] for part in parts]) for name in parts[0].names})

    def split(self, parts: int) -> list[StepBatch]:
        """`parts` contiguous batches of equally many rows (views). Raises BatchError if the rows do not divide."""
        size = _part_size(len(self), parts)
        return [
            StepBatch({name: _slice(column, n * size, n * size + size) for name, column in self._columns.items()})
            for n in range(parts)
        ]

    def __reduce__(self) -> tuple[Callable[..., StepBatch], tuple[Any, ...]]:
        portable = {
            name: _portable(column) if isinstance(column, Tensor) else column for name, column in self._columns.items()
        }
        tensors = [name for name, column in self._columns.items() if isinstance(column, Tensor)]
        return _restore_batch, (portable, tensors)


def objects(values: Iterable[Any]) -> np.ndarray:
    """[rows] object array of any Python values (numpy's own constructor would make tuples a second dimension)."""
    items = list(values)
    out = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        out[index] = item
    return out


def _kind_problems(columns: Mapping[str, Column]) -> Iterator[str]:
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and (column.dtype != object or column.ndim != 1):
            yield f"column {name} is a {column.dtype} array {list(column.shape)}; use a tensor or batch.objects(...)"
        elif isinstance(column, Tensor) and column.dim() == 0:
            yield f"column {name} is a scalar; give one value per row"
        elif not isinstance(column, (Jagged, Tensor, np.ndarray)):
            yield f"column {name} is a {type(column).__name__}; use a Jagged, a tensor or batch.objects(...)"


def _length_problems(columns: Mapping[str, Column]) -> Iterator[str]:
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        yield "columns have different numbers of rows (" + ", ".join(f"{n}: {s}" for n, s in sizes.items()) + ")"
        return
    responses = columns.get("responses")
    for name in RESPONSE_COLUMNS:
        column = columns.get(name)
        if column is None:
            continue
        if not isinstance(column, Jagged):
            yield f"column {name} must be Jagged, one value per response token"
        elif isinstance(responses, Jagged) and not torch.equal(column.lengths, responses.lengths):
            row = int(torch.nonzero(column.lengths != responses.lengths)[0])
            yield (
                f"column {name} has {int(column.lengths[row])} tokens in row {row}"
                f" where responses has {int(responses.lengths[row])}"
            )


def _row_indices(indices: Indices, rows: int) -> Tensor:
    """[n] int64 indices from a sequence, an array or a boolean mask [rows]; BatchError if one is out of range."""
    index = torch.as_tensor(indices).reshape(-1)
    if index.dtype == torch.bool:
        if index.numel() != rows:
            raise BatchError(f"a mask of {index.numel()} values cannot choose among {rows} rows; give one per row")
        return torch.nonzero(index).reshape(-1)
    if index.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    lowest, highest = int(index.min()), int(index.max())
    if index.is_floating_point() or lowest < 0 or highest >= rows:
        raise BatchError(f"row indices must be whole numbers from 0 to {rows - 1}; got {lowest} to {highest}")
    return index.to(torch.int64)


def _part_size(rows: int, parts: int) -> int:
    if parts < 1 or rows % parts:
        raise BatchError(f"{rows} rows cannot be split into {parts} equal parts; align the batch to a multiple first")
    return rows // parts


def _take(column: Column, index: Tensor) -> Column:
    if isinstance(column, Jagged):
        return column.take(index)
    return column[index.to(column.device)] if isinstance(column, Tensor) else column[index.cpu().numpy()]


def _slice(column: Column, start: int, stop: int) -> Column:
    return column._slice(start, stop) if isinstance(column, Jagged) else column[start:stop]


def _concat(name: str, parts: Sequence[Column]) -> Column:
    if all(isinstance(part, Jagged) for part in parts):
        return Jagged.concat([part for part in parts if isinstance(part, Jagged)])
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
    raise BatchError(f"column {name} is of different kinds in the batches to concatenate ({kinds})")


def _portable(tensor: Tensor) -> np.ndarray | Tensor:
    # A tensor pickles its whole storage, so a view of a large batch would carry all of it. A numpy array carries its
    # own elements only, and pickle's protocol 5 (Ray) moves it without a copy.
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tensor(portable: np.ndarray | Tensor) -> Tensor:
    if isinstance(portable, Tensor):
        return portable
    # Ray hands out read-only arrays; torch has no read-only tensors and would let a write through.
    return torch.from_numpy(portable if portable.flags.writeable else portable.copy())


def _restore_jagged(values: np.ndarray | Tensor, lengths: np.ndarray) -> Jagged:
    return Jagged(_tensor(values), _tensor(lengths))


def _restore_batch(columns: dict[str, Any], tensors: list[str]) -> StepBatch:
    return StepBatch({name: _tensor(column) if name in tensors else column for name, column in columns.items()})
