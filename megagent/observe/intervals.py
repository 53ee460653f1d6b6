"""Intervals of a success rate."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # two-sided 95% point of the normal distribution


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """(low, high) score interval of a proportion; inside [0, 1], and not empty at 0 or `trials` successes.

    Raises ValueError unless 0 <= successes <= trials and trials > 0.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials have no interval; there must be at least one trial")
    rate = successes / trials
    spread = z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials))
    # At the ends the interval reaches 0 or 1 exactly; rounding would leave it a hair off.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high
