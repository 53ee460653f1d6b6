"""What a rollout engine holds at the moment, and the only order in which that may change. No vLLM, no processes.

    colocated       serving -> asleep -> weights awake -> synced -> serving
    disaggregated   serving -> drained -> synced -> serving

A colocated engine shares its devices with the trainer. It sleeps while the trainer computes (weights and cache are
given up), gets the memory of its weights back when new ones are about to come, and that of the cache only once they
are there. A disaggregated one keeps everything, and only lets running responses end. Weights in between two versions
are never served: from the moment they are touched, the one way back to serving leads through a complete sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import NamedTuple

from megagent.errors import InfrastructureError, MegagentError


class Phase(StrEnum):
    SERVING = "serving"
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "awake without weights"
    DRAINED = "drained"
    SYNCED = "synced"
    UNUSABLE = "unusable"


class _Step(NamedTuple):
    doing: str
    starts: tuple[Phase, ...]
    end: Phase


_SLEEP = _Step("falling asleep", (Phase.SERVING,), Phase.ASLEEP)
_WAKE = _Step("waking for new weights", (Phase.ASLEEP,), Phase.WEIGHTS_AWAKE)
_DRAIN = _Step("draining", (Phase.SERVING,), Phase.DRAINED)
_SYNC = _Step("syncing", (Phase.WEIGHTS_AWAKE, Phase.DRAINED), Phase.SYNCED)
_SERVE = _Step("going back to serving", (Phase.SYNCED,), Phase.SERVING)


class Residency:
    """The state of one engine. Each verb is a context manager around the work that it names.

    When the work is done the engine is in the next phase; if it raises, the engine is unusable for good. A verb raises
    MegagentError, and nothing has changed, when it comes in the wrong phase, while another one is under way, or with a
    version that is not newer than the present one; InfrastructureError if the engine is unusable.
    """

    def __init__(self, colocated: bool) -> None:
        self.colocated = colocated
        self.phase = Phase.SERVING
        self.version: int | None = None  # of the weights that it computes with; None: those of the model folder
        self.failure: str | None = None  # why it is unusable
        self._doing: str | None = None
        self._coming: int | None = None  # version that was announced by `wake` or `drain`

    def sleep(self, version: int | None = None) -> AbstractContextManager[None]:
        """Weights and cache are given up; only a colocated engine does that. version: if new ones come at once."""
        if not self.colocated:
            raise MegagentError(
                "this engine has devices of its own (rollout.placement=disaggregated) and does not sleep; drain it."
            )
        return self._step(_SLEEP, version)

    def wake(self, version: int) -> AbstractContextManager[None]:
        """A sleeping engine gets the memory of its weights back, without contents, as `version` is about to come."""
        return self._step(_WAKE, version)

    def drain(self, version: int) -> AbstractContextManager[None]:
        """Running responses end, later requests wait, as `version` is about to come; for a disaggregated engine."""
        if self.colocated:
            raise MegagentError(
                "this engine shares its devices with the trainer (rollout.placement=colocated); put it to sleep."
            )
        return self._step(_DRAIN, version)

    def sync(self, version: int) -> AbstractContextManager[None]:
        """The weights become those of `version`."""
        return self._step(_SYNC, version)

    def serve(self) -> AbstractContextManager[None]:
        """Requests are answered again, with the new weights."""
        return self._step(_SERVE)

    def fail(self, reason: str) -> None:
        """The engine is unusable from now on; the first reason stays."""
        if self.failure is None:
            self.failure = reason.rstrip(".")
        self.phase = Phase.UNUSABLE

    def require_usable(self) -> None:
        """Raises InfrastructureError if the engine is unusable."""
        if self.phase is Phase.UNUSABLE:
            raise InfrastructureError(f"the rollout engine is unusable: {self.failure}; start a new one.")

    def require_requests(self) -> None:
        """Raises where a request would wait for something that may never come; during a sync it waits for its end."""
        self.require_usable()
        if self._coming is None and (self.phase is Phase.ASLEEP or self._doing is not None):
            raise MegagentError("the rollout engine sleeps and has no weights; sync new ones before any request.")

    def require_newer(self, version: int) -> None:
        """Raises unless weights of this version are newer than those that the engine has."""
        self.require_usable()
        if self.version is not None and version <= self.version:
            raise MegagentError(
                f"weights of version {version} are not newer than the engine's version {self.version}; "
                "count versions upwards, one for each sync."
            )

    @contextmanager
    def _step(self, step: _Step, version: int | None = None) -> Iterator[None]:
        self._check(step, version)
        self._doing = step.doing
        self._coming = self._coming if version is None else version
        try:
            yield
        except BaseException as error:  # also when it is cancelled: half of the work may be done
            self.fail(f"{step.doing} failed: {error}" if str(error) else f"{step.doing} was interrupted")
            raise
        finally:
            self._doing = None
        if self.phase is Phase.UNUSABLE:
            return  # it died of something else meanwhile
        self.phase = step.end
        if step is _SYNC:
            self.version = self._coming
        if step is _SERVE:
            self._coming = None

    def _check(self, step: _Step, version: int | None) -> None:
        self.require_usable()
        if self._doing is not None:
            raise MegagentError(
                f"{step.doing} has to wait: the rollout engine is {self._doing}, which is still under way."
            )
        if self.phase not in step.starts:
            order = "sleep, wake, sync, serve" if self.colocated else "drain, sync, serve"
            raise MegagentError(
                f"the rollout engine is {self.phase}, and {step.doing} begins when it is {' or '.join(step.starts)}. "
                f"The order is {order}."
            )
        if version is None:
            return
        if self._coming is not None and version != self._coming:
            raise MegagentError(f"weights of version {version} came where version {self._coming} was announced.")
        self.require_newer(version)
