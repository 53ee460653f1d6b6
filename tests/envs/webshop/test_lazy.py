from __future__ import annotations

import numpy as np
import pytest

from megagent.envs.webshop.lazy import LazySequence


class Squares(LazySequence[int]):
    def __len__(self) -> int:
        return 10

    def _at(self, index: int) -> int:
        return index * index


def test_indices_and_slices_mean_what_they_do_for_a_list():
    lazy, listed = Squares(), [number * number for number in range(10)]
    assert list(lazy) == listed
    assert [lazy[-1], lazy[-10], lazy[3]] == [listed[-1], listed[-10], listed[3]]
    for part in (slice(3, 9, 2), slice(None, None, -1), slice(-3, None), slice(8, 100)):
        assert lazy[part] == listed[part]


@pytest.mark.parametrize("index", [10, -11])
def test_an_index_out_of_range_is_an_error(index):
    with pytest.raises(IndexError, match=f"element {index} of 10"):
        Squares()[index]


def test_numpys_integers_are_indices_too():
    """As plain integers: computed orders multiply words of 64 bits, which overflow in numpy's arithmetic."""
    kinds = [type(Kinds()[index]) for index in (np.int64(3), np.int64(-1), 3)]
    assert kinds == [int, int, int]


class Kinds(LazySequence[int]):
    def __len__(self) -> int:
        return 10

    def _at(self, index: int) -> int:
        return index
