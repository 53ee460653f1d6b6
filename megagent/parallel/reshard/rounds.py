"""The rounds of a plan: the order in which all ranks move its copies, a bounded number of bytes at a time."""

from __future__ import annotations

from megagent.parallel.reshard.plan import Copy, Plan

Rounds = tuple[tuple[Copy, ...], ...]


def cut_rounds(plan: Plan, buffer_bytes: int) -> Rounds:
    """Every copy of the plan once, tensor by tensor over all targets at a time (a layer's parameters follow each other).

    In one round no rank sends another more than buffer_bytes, in the wider of the two dtypes; a larger copy is cut
    along its first axis. All ranks walk through the rounds in this order, so none waits for one that waits for it.
    """
    raise NotImplementedError
