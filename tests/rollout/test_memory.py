"""What an agent remembers of its episode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagent.rollout.memory import History, Step


def test_a_new_history_is_empty():
    history = History(2)
    assert (history.taken, history.last()) == (0, ())


def test_the_last_steps_are_kept_oldest_first_and_all_are_counted():
    history = History(2)
    for name in "abc":
        history.add(f"page {name}", f"click[{name}]")
    assert history.taken == 3
    assert history.last() == (Step("page b", "click[b]"), Step("page c", "click[c]"))


def test_length_zero_counts_but_remembers_nothing():
    history = History(0)
    history.add("page", "click[a]")
    assert (history.taken, history.last()) == (1, ())


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="-1"):
        History(-1)


@given(length=st.integers(0, 5), actions=st.lists(st.text(max_size=3), max_size=12))
def test_last_is_the_tail_of_everything_added(length, actions):
    history = History(length)
    for action in actions:
        history.add("page", action)
    assert [step.action for step in history.last()] == (actions[-length:] if length else [])
