"""Micro-batches by tokens: as many rows as a budget holds, dealt to the ranks by their estimated cost.

Micro-batches of a fixed number of rows in arrival order are padded to their longest row and as uneven as the episodes.
Here a micro-batch holds as many rows of similar length as a token budget allows (of any length, where rows lie end to
end), every rank has equally many, and the ranks' work is balanced by an estimate that knows attention to be quadratic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from megagent.errors import BatchError

Tokens = TypeVar("Tokens", int, Tensor)

_REFINEMENTS = 64  # swaps between the busiest and the idlest rank; each about halves what is left between them
_MANY = 1024  # rows of a rank from which on their number evens them out, and comparing all pairs takes long


@dataclass(frozen=True)
class Packing:
    """ranks[r][m]: row indices [n] int64 of micro-batch m on data-parallel rank r, longest row first.

    All ranks have equally many. One without rows is there for the others' sake: the caller runs a padding row in it.
    lengths: [rows] int64 tokens of every row; end_to_end, length_multiple: as in pack.
    """

    ranks: tuple[tuple[Tensor, ...], ...]
    lengths: Tensor
    end_to_end: bool = False
    length_multiple: int = 1

    @property
    def micro_batches(self) -> int:
        """Of one rank."""
        return len(self.ranks[0])

    def tokens(self) -> list[int]:
        """Real tokens of each rank."""
        return [sum(int(self.lengths[rows].sum()) for rows in rank) for rank in self.ranks]

    def padded_tokens(self) -> list[int]:
        """Tokens that each rank computes."""
        return [
            sum(laid_tokens(self.lengths[rows], self.end_to_end, self.length_multiple) for rows in rank)
            for rank in self.ranks
        ]

    @property
    def waste(self) -> float:
        """Share of the computed tokens that are padding."""
        return padding_waste(sum(self.tokens()), sum(self.padded_tokens()))

    @property
    def imbalance(self) -> float:
        """How far the busiest rank's real tokens are above the mean, as a share of it: what the others wait."""
        return dp_imbalance(torch.tensor([self.tokens()]))


def laid_tokens(lengths: Tensor, end_to_end: bool = False, length_multiple: int = 1) -> int:
    """Tokens that a micro-batch of rows of these lengths [n] computes, padding included.

    Every row is as long as the longest, or rows lie end to end; filled up to a multiple of length_multiple.
    """
    if not len(lengths):
        return 0
    rows, length = (1, int(lengths.sum())) if end_to_end else (len(lengths), int(lengths.max()))
    return rows * _rounded_up(length, length_multiple)


def padding_waste(tokens: float, padded_tokens: float) -> float:
    """Share of the computed tokens that are padding; 0 of none."""
    return 1.0 - tokens / padded_tokens if padded_tokens else 0.0


def dp_imbalance(tokens: Tensor) -> float:
    """What the ranks wait for each other, as a share of their mean work; 0 of none.

    tokens: [steps, ranks] real tokens; ranks meet at the end of each step, so the busiest of each step counts.
    """
    mean = float(tokens.double().mean(dim=1).sum())
    return float(tokens.double().amax(dim=1).sum()) / mean - 1.0 if mean else 0.0


def row_costs(lengths: Tensor, quadratic_at: float = math.inf) -> Tensor:
    """[rows] float64: estimated work of a row, l (1 + l / quadratic_at) for one of l tokens.

    quadratic_at: the length at which attention costs as much as everything else: about 12 x the hidden size for a
    dense transformer under a causal mask (2 h l against 24 h^2 operations a token and layer). inf counts tokens.
    """
    tokens = lengths.to(torch.float64)
    return tokens * (1.0 + tokens / quadratic_at)


def pack(
    lengths: Tensor,
    dp: int,
    token_budget: int,
    multiple: int = 1,
    quadratic_at: float = math.inf,
    end_to_end: bool = False,
    length_multiple: int = 1,
) -> Packing:
    """Rows for dp ranks in micro-batches of at most token_budget tokens, their padding included.

    Padded rows are ordered by length and cut into as few micro-batches as come in multiples of dp x multiple, of costs
    as equal as can be; rows that lie end to end need not be alike and fill as few equally. These are dealt to the
    ranks, equally many to each, so that the ranks' costs are equal too; rows end to end then change places for that.
    lengths: [rows] int64, at least 1 each. multiple: what the schedule needs on each rank
    (ScheduleSizes.micro_batch_multiple). quadratic_at: see row_costs. end_to_end: rows of a micro-batch are not padded
    to the longest. length_multiple: rows are filled up to a multiple of it (schedule.token_multiple). Every row is in
    exactly one micro-batch, and the same input gives the same packing. Raises BatchError for a row longer than the
    budget, or numbers below 1.
    """
    lengths = lengths.to(torch.int64).cpu()
    if min(dp, multiple, length_multiple) < 1:
        raise BatchError(f"rows cannot be packed for {dp} ranks in multiples of {multiple}; use at least 1 of each")
    if lengths.numel() and int(lengths.min()) < 1:
        raise BatchError(f"row {int(lengths.argmin())} has {int(lengths.min())} tokens; a packed row needs at least 1")
    order = torch.argsort(lengths, descending=True, stable=True)
    tokens = _rounded_up(lengths[order], length_multiple)
    if tokens.numel() and int(tokens[0]) > token_budget:
        raise BatchError(
            f"row {int(order[0])} has {int(lengths.max())} tokens, more than the {token_budget} of a whole "
            f"micro-batch; raise the token budget to at least {int(tokens[0])}"
        )
    costs = row_costs(lengths[order], quadratic_at)
    unit = dp * multiple
    if end_to_end:
        pieces, work = _filled(tokens.tolist(), costs.tolist(), token_budget, unit)
    else:
        pieces, work = _sliced(costs.tolist(), (token_budget // tokens).tolist(), unit)
    missing = -len(pieces) % unit
    pieces += [order[:0]] * missing
    # Longest first on every rank, so that a run that does not fit into memory fails at once.
    dealt = (sorted(numbers.tolist()) for numbers in deal(torch.tensor(work + [0.0] * missing), dp))
    ranks = [[pieces[number] for number in numbers] for numbers in dealt]
    if end_to_end:
        ranks = _levelled(ranks, tokens, costs, token_budget)
    return Packing(tuple(tuple(order[rows] for rows in rank) for rank in ranks), lengths, end_to_end, length_multiple)


def _rounded_up(tokens: Tokens, multiple: int) -> Tokens:
    return -(-tokens // multiple) * multiple


def _sliced(costs: Sequence[float], most_rows: Sequence[int], unit: int) -> tuple[list[Tensor], list[float]]:
    """Micro-batches of neighbours for padded rows, as places [n] int64 in the order of the rows, and their costs.

    costs, most_rows: of each row, longest first; most_rows: how many fit if it is the longest.
    """
    fewest = len(_cut(costs, most_rows, math.inf))
    starts = _cut_evenly(costs, most_rows, _rounded_up(fewest, unit))
    pieces = [torch.arange(start, stop) for start, stop in pairwise([*starts, len(costs)])]
    return pieces, [costs[start] * len(piece) for start, piece in zip(starts, pieces, strict=True)]


def _filled(
    tokens: Sequence[int], costs: Sequence[float], token_budget: int, unit: int
) -> tuple[list[Tensor], list[float]]:
    """As _sliced, for rows end to end: each goes to the cheapest micro-batch that has room for it, longest first."""
    count = _rounded_up(-(-sum(tokens) // token_budget), unit)
    while True:
        found = _filled_into(tokens, costs, token_budget, count)
        if found is not None:
            return found
        count += unit


def _filled_into(
    tokens: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> tuple[list[Tensor], list[float]] | None:
    """_filled with this many micro-batches; None if a row finds no room. Rows of equal length always fit into as many
    as whole rows of them ask for, so the search above ends."""
    places: list[list[int]] = [[] for _ in range(count)]
    room = [token_budget] * count
    work = [0.0] * count
    cheapest = [(0.0, number) for number in range(count)]
    for place, (length, cost) in enumerate(zip(tokens, costs, strict=True)):
        full = []
        while cheapest and room[cheapest[0][1]] < length:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        _, number = cheapest[0]
        places[number].append(place)
        room[number] -= length
        work[number] += cost
        heapq.heapreplace(cheapest, (work[number], number))
        for each in full:
            heapq.heappush(cheapest, each)
    pieces = [torch.tensor(each, dtype=torch.int64) for each in places]
    return pieces, work


def _cut(costs: Sequence[float], most_rows: Sequence[int], cap: float) -> list[int]:
    """Where micro-batches start if each takes rows in order until it holds most_rows, or would cost more than cap.

    costs, most_rows: of each row, longest first; all rows of a micro-batch cost what its first does. One row always
    fits.
    """
    starts, start = [], 0
    while start < len(costs):
        starts.append(start)
        start += max(min(most_rows[start], math.floor(min(cap / costs[start], len(costs)))), 1)
    return starts


def _cut_evenly(costs: Sequence[float], most_rows: Sequence[int], count: int) -> list[int]:
    """Where `count` micro-batches start, the dearest as cheap as can be; fewer only if there are fewer rows."""
    low, high = 0.0, max(costs, default=0.0) * len(costs) + 1.0  # all rows, padded, fit into the upper one
    for _ in range(50):
        middle = (low + high) / 2
        if len(_cut(costs, most_rows, middle)) <= count:
            high = middle
        else:
            low = middle
    starts = _cut(costs, most_rows, high)
    # The bisection may leave a few over: halve the dearest.
    queue = [(-costs[start] * (stop - start), start, stop) for start, stop in pairwise([*starts, len(costs)])]
    heapq.heapify(queue)
    done: list[int] = []  # starts of single rows
    while queue and len(queue) + len(done) < count:
        _, start, stop = heapq.heappop(queue)
        if stop - start < 2:
            done.append(start)
            continue
        half = (start + stop) // 2
        for left, right in ((start, half), (half, stop)):
            heapq.heappush(queue, (-costs[left] * (right - left), left, right))
    return sorted([*done, *(start for _, start, _ in queue)])


def _levelled(ranks: list[list[Tensor]], tokens: Tensor, costs: Tensor, token_budget: int) -> list[list[Tensor]]:
    """Rows exchanged between the busiest and the idlest rank where they fit; whole micro-batches are coarse if few.

    ranks[r][m]: places [n] int64 of rows end to end; tokens, costs: [rows] by place.
    """
    sizes = [[len(part) for part in rank] for rank in ranks]
    rows = [torch.cat([tokens[:0], *rank]) for rank in ranks]
    loads = [float(costs[each].sum()) for each in rows]

    def fits(high: int, low: int) -> Tensor:
        """[rows of high, rows of low]: whether the one has room in the place of the other, which is the shorter."""
        parts = torch.split(tokens[rows[low]], sizes[low])
        most = torch.cat([part + (token_budget - part.sum()) for part in parts])
        return tokens[rows[high]][:, None] <= most[None, :]

    for _ in range(_REFINEMENTS if max(map(len, rows)) <= _MANY else 0):
        if not _swap(rows, loads, costs, fits):
            break
    return [[part.sort().values for part in torch.split(each, size)] for each, size in zip(rows, sizes, strict=True)]


def deal(costs: Tensor, parts: int) -> list[Tensor]:
    """Numbers [n / parts] int64 of what each of `parts` ranks gets, equally many, with sums of costs nearly equal.

    costs: [n], n a multiple of parts. Dearest first to whoever has least (LPT), then swaps between the busiest and the
    idlest.
    """
    if parts < 1 or costs.numel() % parts:
        raise BatchError(f"{costs.numel()} micro-batches cannot be dealt equally to {parts} ranks")
    values = costs.tolist()
    loads = [(0.0, part) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    totals = [0.0] * parts
    for number in torch.argsort(costs, descending=True, stable=True).tolist():
        load, part = heapq.heappop(loads)
        dealt[part].append(number)
        totals[part] = load + values[number]
        if len(dealt[part]) < len(values) // parts:
            heapq.heappush(loads, (totals[part], part))
    pieces = [torch.tensor(numbers, dtype=torch.int64) for numbers in dealt]
    for _ in range(_REFINEMENTS):
        if not _swap(pieces, totals, costs):
            break
    return pieces


def _swap(
    pieces: list[Tensor], loads: list[float], costs: Tensor, fits: Callable[[int, int], Tensor] | None = None
) -> bool:
    """Exchange what brings the busiest and the idlest part closest together, one for one; False if nothing does.

    fits(busiest, idlest): [n, m] bool, which exchanges are allowed; all by default.
    """
    high, low = loads.index(max(loads)), loads.index(min(loads))
    gap = loads[high] - loads[low]
    if gap <= 0:
        return False
    difference = costs[pieces[high]][:, None] - costs[pieces[low]][None, :]
    helps = difference > 0 if fits is None else (difference > 0) & fits(high, low)
    left = torch.where(helps, (gap - 2 * difference).abs(), gap)
    if not left.numel():
        return False
    best = int(left.argmin())
    if float(left.reshape(-1)[best]) >= gap * (1 - 1e-6):
        return False
    mine, theirs = divmod(best, len(pieces[low]))
    moved = float(difference[mine, theirs])
    given = int(pieces[high][mine])
    pieces[high][mine], pieces[low][theirs] = int(pieces[low][theirs]), given
    loads[high] -= moved
    loads[low] += moved
    return True
