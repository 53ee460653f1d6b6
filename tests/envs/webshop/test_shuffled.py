from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megagent.envs.webshop.shuffled import Shuffled


def shuffled(length: int, seed: int) -> list[int]:
    numbers = list(range(length))
    random.Random(seed).shuffle(numbers)
    return numbers


@given(length=st.integers(0, 3000), seed=st.integers(0, 2000))
@example(length=6910, seed=0)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_all_places_together_are_pythons_shuffle(length, seed):
    assert Shuffled(length, seed).order().tolist() == shuffled(length, seed)


@given(length=st.integers(1, 400), seed=st.integers(0, 2000))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_each_place_by_itself_is_pythons_shuffle(length, seed):
    places = Shuffled(length, seed)
    assert [places[place] for place in range(length)] == shuffled(length, seed)


def test_a_long_list_takes_many_blocks_of_words():
    expected = shuffled(300_000, 5)
    places = Shuffled(300_000, 5)
    for place in (0, 1, 2, 65_535, 65_536, 131_072, 262_143, 262_144, 299_999):
        assert places[place] == expected[place]


def test_a_place_beyond_the_list_is_an_error():
    with pytest.raises(IndexError, match="place 5 of 5"):
        Shuffled(5, 0)[5]
