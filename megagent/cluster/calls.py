"""Waiting for remote calls: every wait has a deadline, and the first failure ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megagent.errors import InfrastructureError, MegagentError


def wait_all(calls: Mapping[str, ray.ObjectRef], doing: str, timeout_s: float) -> dict[str, Any]:
    """The results of remote calls, by the name of who was called.

    Raises as soon as one of them fails: its peers may hang in a collective that the failed one will never join.
    """
    names = {ref: name for name, ref in calls.items()}
    results: dict[str, Any] = {}
    pending = list(names)
    deadline = time.monotonic() + timeout_s
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(sorted(names[ref] for ref in pending))
            raise InfrastructureError(
                f"{doing}: no answer from {late} within {timeout_s:.0f} s. "
                "Raise cluster.timeout_s if the work is that long; else look at the Ray logs of that process."
            )
        try:
            results[names[ready[0]]] = ray.get(ready[0])
        except RayError as error:
            raise as_infrastructure_error(error, names[ready[0]], doing) from error
    return {name: results[name] for name in calls}


async def answer(ref: ray.ObjectRef, who: str, doing: str, timeout_s: float, key: str) -> Any:
    """The result of one remote call inside an event loop, within a deadline. key: what sets the deadline."""
    try:
        return await asyncio.wait_for(_awaited(ref), timeout_s)
    except TimeoutError as error:
        raise InfrastructureError(
            f"{doing}: no answer from {who} within {timeout_s:.0f} s. "
            f"Raise {key} if the work is that long; else look at the Ray logs of that process."
        ) from error
    except RayError as error:
        raise as_infrastructure_error(error, who, doing) from error


async def _awaited(ref: ray.ObjectRef) -> Any:
    return await ref


def as_infrastructure_error(error: RayError, who: str, doing: str) -> MegagentError:
    """What a failed remote call means to the user: his own mistake as it was raised, else who failed at what."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, MegagentError):
        return error.cause
    if isinstance(error, RayTaskError):
        return InfrastructureError(f"{doing}: {who} raised {type(error.cause).__name__}: {error.cause}")
    if isinstance(error, RayActorError):
        return InfrastructureError(f"{doing}: the process of {who} died ({str(error).splitlines()[0]}).")
    return InfrastructureError(f"{doing}: {who} failed: {error}")
