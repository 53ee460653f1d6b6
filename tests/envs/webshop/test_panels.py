from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs.base import SPLITS
from megagent.envs.webshop.panels import SHARES, Shuffle, panel_of, split_by_product, split_by_request


@given(length=st.integers(0, 300), key=st.sampled_from(["train", "test"]))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_shuffle_holds_every_number_once(length, key):
    shuffle = Shuffle(length, key)
    assert sorted(shuffle) == list(range(length))
    assert shuffle[:] == list(shuffle)


def test_a_shuffle_of_billions_answers_without_being_made():
    shuffle = Shuffle(6_000_000_000, "train")
    some = [shuffle[index] for index in (0, 1, 5_999_999_999, -1)]
    assert some[2] == some[3]
    assert len(set(some)) == 3
    with pytest.raises(IndexError):
        shuffle[6_000_000_000]


def test_any_first_part_of_a_shuffle_is_a_fair_sample():
    first = Shuffle(100_000, "train")[:2000]
    tenths = Counter(number // 10_000 for number in first)
    assert all(140 < tenths[tenth] < 260 for tenth in range(10))
    rising = sum(one < other for one, other in pairwise(first))
    assert 900 < rising < 1100


def test_another_key_gives_another_order():
    assert Shuffle(1000, "train")[:10] != Shuffle(1000, "test")[:10]


def test_a_panel_follows_from_the_asin_and_takes_its_share():
    counts = Counter(SPLITS[panel_of(f"B{number}")] for number in range(5000))
    for split, share in SHARES.items():
        assert abs(counts[split] / 5000 - share) < 0.03
    assert panel_of("B09QQP3356") == panel_of("B09QQP3356")


def test_every_goal_is_in_one_panel_that_of_its_product():
    panels = np.array([0, 1, 1, 3, 1], dtype=np.uint8)
    counts = np.array([2, 3, 0, 1, 1], dtype=np.uint32)
    split = split_by_product(panels, counts)
    assert {name: sorted(places) for name, places in split.items()} == {
        "warmup": [(0, 0), (0, 1)],
        "train": [(1, 0), (1, 1), (1, 2), (4, 0)],
        "validation": [],
        "test": [(3, 0)],
    }
    assert split["train"][1:3] == [split["train"][1], split["train"][2]]


def test_goals_of_the_same_request_go_together_and_held_out_panels_have_their_size():
    requests = {f"request {number}": [(number, 0), (number, 1)] for number in range(50)}
    split = split_by_request(requests, held_out=10)
    assert {name: len(places) for name, places in split.items()} == {
        "warmup": 40,
        "train": 40,
        "validation": 10,
        "test": 10,
    }
    where = {position: {name for name in SPLITS if (position, 0) in split[name]} for position in range(50)}
    assert all(len(names) == 1 and (position, 1) in split[next(iter(names))] for position, names in where.items())
