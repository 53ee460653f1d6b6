"""Plans on tensors that this process holds: the slow, plain way that a transport's results are compared with.

Arrays of numpy and tensors of torch both do: a plan only slices and assigns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import Plan

Held = Mapping[int, Mapping[str, Any]]  # rank -> name -> array or tensor


def allocate(layout: Layout, empty: Callable[[tuple[int, ...]], Any]) -> dict[int, dict[str, Any]]:
    """A tensor by `empty(shape)` for each of the layout's."""
    return {rank: {tensor.name: empty(tensor.shape) for tensor in tensors} for rank, tensors in layout.tensors.items()}


def execute(plan: Plan, source: Held, target: Held) -> None:
    """Copy everything, and zero the padding. The plan is checked before: nothing is written by a faulty one."""
    plan.check()
    for fill in plan.fills:
        target[fill.target_rank][fill.target][fill.region.slices] = 0
    for copy in plan.copies:
        part = source[copy.source_rank][copy.source][copy.source_slices]
        target[copy.target_rank][copy.target][copy.target_slices] = part
