from __future__ import annotations

from itertools import combinations
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.packing import deal, laid_tokens, pack, row_costs
from megagent.errors import BatchError

lengths_of = st.lists(st.integers(1, 500), max_size=60)


@given(lengths_of, st.integers(1, 5), st.integers(500, 2000), st.integers(1, 4))
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int], dp: int, budget: int, multiple: int) -> None:
    packing = pack(torch.tensor(lengths, dtype=torch.int64), dp, budget, multiple)
    rows = [int(row) for rank in packing.ranks for micro_batch in rank for row in micro_batch]
    assert sorted(rows) == list(range(len(lengths)))


@given(lengths_of, st.integers(1, 5), st.integers(500, 2000), st.integers(1, 4))
def test_ranks_have_equally_many_micro_batches_and_a_multiple(
    lengths: list[int], dp: int, budget: int, multiple: int
) -> None:
    packing = pack(torch.tensor(lengths, dtype=torch.int64), dp, budget, multiple)
    assert len(packing.ranks) == dp
    assert {len(rank) for rank in packing.ranks} == {packing.micro_batches}
    assert packing.micro_batches % multiple == 0


@given(lengths_of, st.integers(1, 5), st.integers(500, 2000), st.integers(1, 4))
def test_no_micro_batch_is_over_the_budget_with_its_padding(
    lengths: list[int], dp: int, budget: int, multiple: int
) -> None:
    packing = pack(torch.tensor(lengths, dtype=torch.int64), dp, budget, multiple, quadratic_at=300.0)
    for rank in packing.ranks:
        for micro_batch in rank:
            if len(micro_batch):
                assert len(micro_batch) * int(packing.lengths[micro_batch].max()) <= budget


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_only_a_lack_of_rows_leaves_a_micro_batch_empty(lengths: list[int], dp: int, multiple: int) -> None:
    packing = pack(torch.tensor(lengths, dtype=torch.int64), dp, 1000, multiple)
    filled = sum(len(micro_batch) > 0 for rank in packing.ranks for micro_batch in rank)
    assert filled == min(len(lengths), dp * packing.micro_batches)


def test_a_packing_by_hand() -> None:
    """Two ranks, 10 tokens a micro-batch: 9, 5 5, 5 4 and 1 1, each padded to its longest, cost 9, 10, 10 and 2."""
    packing = pack(torch.tensor([9, 5, 5, 1, 5, 1, 4]), 2, 10)
    assert [[sorted(micro_batch.tolist()) for micro_batch in rank] for rank in packing.ranks] == [
        [[0], [1, 2]],
        [[4, 6], [3, 5]],
    ]
    assert packing.tokens() == [19, 11]
    assert packing.padded_tokens() == [19, 12]


def test_a_packing_end_to_end_by_hand() -> None:
    """Two ranks, 12 tokens a micro-batch: 26 tokens take four, of 9, 6, 6 and 5; a rank's are the first and the last.
    Filled up to even lengths they are 10, 6, 6 and 6."""
    packing = pack(torch.tensor([9, 5, 5, 1, 5, 1]), 2, 12, end_to_end=True, length_multiple=2)
    assert [[sorted(micro_batch.tolist()) for micro_batch in rank] for rank in packing.ranks] == [
        [[0], [4]],
        [[1, 3], [2, 5]],
    ]
    assert packing.tokens() == [14, 12]
    assert packing.padded_tokens() == [16, 12]


@given(lengths_of, st.integers(1, 5), st.integers(500, 2000), st.integers(1, 4), st.integers(1, 8))
def test_rows_end_to_end_are_each_once_in_micro_batches_within_the_budget(
    lengths: list[int], dp: int, budget: int, multiple: int, length_multiple: int
) -> None:
    budget += length_multiple
    packing = pack(
        torch.tensor(lengths, dtype=torch.int64),
        dp,
        budget,
        multiple,
        quadratic_at=300.0,
        end_to_end=True,
        length_multiple=length_multiple,
    )
    micro_batches = [rows for rank in packing.ranks for rows in rank]
    assert sorted(int(row) for rows in micro_batches for row in rows) == list(range(len(lengths)))
    assert {len(rank) for rank in packing.ranks} == {packing.micro_batches}
    assert packing.micro_batches % multiple == 0
    assert all(laid_tokens(packing.lengths[rows], True, length_multiple) <= budget for rows in micro_batches)


@given(lengths_of, st.integers(1, 5), st.booleans())
def test_never_more_micro_batches_than_rows_of_the_greatest_length_need(
    lengths: list[int], dp: int, end_to_end: bool
) -> None:
    packing = pack(torch.tensor(lengths, dtype=torch.int64), dp, 1700, end_to_end=end_to_end)
    assert packing.micro_batches <= ceil(ceil(len(lengths) / 3) / dp)


def test_rows_padded_to_the_ranks_of_sequence_parallelism_stay_within_the_budget() -> None:
    """Two rows of 5 tokens are 16 with padding to 8, not 10."""
    assert pack(torch.tensor([5, 5]), 1, 10, length_multiple=8, end_to_end=False).micro_batches == 2


def test_rows_end_to_end_change_places_where_whole_micro_batches_are_too_coarse() -> None:
    lengths = torch.randint(300, 1000, (64,), generator=torch.Generator().manual_seed(0))
    assert pack(lengths, 8, 16384, multiple=2, end_to_end=True).imbalance < 0.005
    assert pack(lengths, 8, 16384, multiple=2).imbalance > 0.02  # padded, for comparison


def test_padding_and_imbalance_are_small_where_rows_are_many() -> None:
    lengths = (torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 0.4 + 6).exp().long().clamp(1, 4000)
    packing = pack(lengths, 8, 8192, multiple=4, quadratic_at=40_000)
    assert packing.waste < 0.05
    assert packing.imbalance < 0.03


def test_attention_counts_quadratically() -> None:
    assert row_costs(torch.tensor([100, 200]), quadratic_at=100.0).tolist() == [200.0, 600.0]
    assert row_costs(torch.tensor([100, 200])).tolist() == [100.0, 200.0]


@given(st.lists(st.integers(1, 50), min_size=3, max_size=3).map(lambda half: half * 2))
def test_few_things_are_dealt_nearly_as_well_as_can_be(costs: list[int]) -> None:
    parts = deal(torch.tensor(costs, dtype=torch.float64), 2)
    assert sorted(int(number) for part in parts for number in part) == list(range(len(costs)))
    dearest = max(sum(costs[number] for number in part.tolist()) for part in parts)
    best = min(max(sum(half), sum(costs) - sum(half)) for half in combinations(costs, len(costs) // 2))
    assert dearest <= best * 4 / 3


def test_the_same_rows_are_packed_the_same_way() -> None:
    lengths = torch.randint(1, 500, (200,), generator=torch.Generator().manual_seed(0))
    first, again = pack(lengths, 4, 2000), pack(lengths, 4, 2000)
    assert all(
        torch.equal(a, b)
        for one, two in zip(first.ranks, again.ranks, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize(
    ("lengths", "dp", "sentence"),
    [
        ([5, 11, 3], 2, "row 1 has 11 tokens, more than the 10 of a whole micro-batch; raise the token budget"),
        ([5, 0], 2, "row 1 has 0 tokens; a packed row needs at least 1"),
        ([5], 0, "cannot be packed for 0 ranks"),
    ],
)
def test_what_cannot_be_packed_is_told(lengths: list[int], dp: int, sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        pack(torch.tensor(lengths), dp, 10)
