from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagent.observe.intervals import wilson_interval

counts = st.integers(1, 500).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))


def test_a_published_example() -> None:
    """81 of 263: R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_nothing_of_ten_still_leaves_room_above() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-5)


@given(counts)
def test_the_interval_holds_the_rate_and_stays_in_range(count: tuple[int, int]) -> None:
    successes, trials = count
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high


@given(counts)
def test_failures_mirror_successes(count: tuple[int, int]) -> None:
    successes, trials = count
    low, high = wilson_interval(successes, trials)
    assert wilson_interval(trials - successes, trials) == pytest.approx((1 - high, 1 - low))


@given(counts)
def test_more_trials_at_the_same_rate_narrow_it(count: tuple[int, int]) -> None:
    successes, trials = count
    low, high = wilson_interval(successes, trials)
    narrow_low, narrow_high = wilson_interval(10 * successes, 10 * trials)
    assert narrow_high - narrow_low < high - low


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 5)])
def test_impossible_counts_are_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="have no interval"):
        wilson_interval(successes, trials)
