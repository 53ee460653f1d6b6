"""Which tasks an iteration plays. Stateless: an iteration's tasks follow from the seed, so a resumed run continues."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megagent.envs.base import Task


def draw_tasks(tasks: Sequence[Task], count: int, seed: int, iteration: int) -> list[Task]:
    """`count` tasks of iteration 1, 2, ...: passes over `tasks` in a new order each, cut into iterations.

    A task comes again only after all others have come, and twice in one iteration only if there are fewer than `count`.
    """
    first = (iteration - 1) * count
    chosen: list[Task] = []
    while len(chosen) < count:
        epoch, offset = divmod(first + len(chosen), len(tasks))
        order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
        chosen += [tasks[index] for index in order[offset : offset + count - len(chosen)]]
    return chosen
