"""Checksums: the same at both ends however the copies are cut, and another one for anything that went wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.parallel.reshard.checksum import copy_checksum, differences, merge
from megagent.parallel.reshard.plan import Copy


def of(part: torch.Tensor, start: tuple[int, ...]) -> int:
    return copy_checksum(Copy(0, "a", start, 0, "a", start, tuple(part.shape)), part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_parts_of_a_tensor_sum_up_to_the_tensor(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = of(whole[:2], (0, 0)) + of(whole[2:, :3], (2, 0)) + of(whole[2:, 3:], (2, 3))
    assert parts % 2**64 == of(whole, (0, 0))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_matrix_counts_alike_alone_and_in_its_stack(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    alone = sum(of(stack[number], (number, 0, 0)) for number in range(len(stack)))
    assert alone % 2**64 == of(stack, (0, 0, 0))


def test_large_tensors_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(40, 7)
    expected = of(whole, (3, 4))
    monkeypatch.setattr("megagent.parallel.reshard.checksum._AT_ONCE", 15)
    assert of(whole, (3, 4)) == expected


def test_zeros_count_nothing_so_padding_need_not_be_named() -> None:
    assert of(torch.zeros(3, 4), (5, 0)) == 0
    assert differences({0: {}}, {0: {"padding": 0}}) == []


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_one_wrong_bit_or_two_elements_in_each_others_place_show(data: st.DataObject) -> None:
    rows, columns = data.draw(st.tuples(st.integers(1, 8), st.integers(2, 8)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    right = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int64).to(torch.int32)
    wrong = right.clone().view(-1)
    one, other = data.draw(st.lists(st.integers(0, rows * columns - 1), min_size=2, max_size=2, unique=True))
    if data.draw(st.booleans()):
        wrong[one] ^= 1 << data.draw(st.integers(0, 30))
    else:
        wrong[one] += right.view(-1)[one] == right.view(-1)[other]  # so that they differ
        right.view(-1)[one] = wrong[one]
        wrong[[one, other]] = wrong[[other, one]]
    sums = [of(values.view(rows, columns).view(torch.float32), (4, 2)) for values in (right, wrong)]
    assert sums[0] != sums[1]


def test_rows_or_columns_or_blocks_in_each_others_place_show() -> None:
    right = torch.arange(1.0, 37.0).view(6, 6)
    rows, columns, blocks = right.clone(), right.clone(), right.clone()
    rows[[1, 4]] = rows[[4, 1]]
    columns[:, [0, 5]] = columns[:, [5, 0]]
    blocks[:2, :2], blocks[2:4, :2] = right[2:4, :2], right[:2, :2]
    sums = [of(each, (0, 0)) for each in (right, rows, columns, blocks)]
    assert len(set(sums)) == 4


def test_tensors_that_arrived_otherwise_are_named() -> None:
    sent = merge([{0: {"a": 2**64 - 1, "b": 5}}, {0: {"a": 3}, 1: {"a": 7}}])
    assert sent == {0: {"a": 2, "b": 5}, 1: {"a": 7}}
    assert differences(sent, {0: {"a": 2, "b": 6}}) == ["b on worker 0", "a on worker 1"]
