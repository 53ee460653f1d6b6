"""The order in which an engine's weights come and go: by hand, and under everything that may happen out of order."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megagent.errors import InfrastructureError, MegagentError
from megagent.rollout.residency import Phase, Residency


def done(*steps: AbstractContextManager[None]) -> None:
    for step in steps:
        with step:
            pass


def test_a_colocated_engine_sleeps_wakes_syncs_and_serves() -> None:
    engine = Residency(colocated=True)
    seen = []
    for step in (engine.sleep(), engine.wake(1), engine.sync(1), engine.serve()):
        done(step)
        seen.append(engine.phase)
    assert seen == [Phase.ASLEEP, Phase.WEIGHTS_AWAKE, Phase.SYNCED, Phase.SERVING]
    assert engine.version == 1


def test_a_disaggregated_engine_drains_syncs_and_serves() -> None:
    engine = Residency(colocated=False)
    done(engine.drain(1), engine.sync(1), engine.serve())
    assert (engine.phase, engine.version) == (Phase.SERVING, 1)


def test_a_sync_into_a_sleeping_engine_is_refused_and_changes_nothing() -> None:
    engine = Residency(colocated=True)
    done(engine.sleep())
    with pytest.raises(MegagentError, match="is asleep, and syncing begins when it is awake without weights"):
        done(engine.sync(1))
    done(engine.wake(1), engine.sync(1), engine.serve())
    assert engine.version == 1


def test_an_engine_without_its_weights_does_not_serve() -> None:
    engine = Residency(colocated=True)
    done(engine.sleep())
    with pytest.raises(MegagentError, match="going back to serving begins when it is synced"):
        done(engine.serve())


def test_a_serving_engine_is_not_synced_under_its_responses() -> None:
    engine = Residency(colocated=False)
    with pytest.raises(MegagentError, match="is serving, and syncing begins when it is .*drained. The order is drain"):
        done(engine.sync(1))


@pytest.mark.parametrize("version", [2, 3], ids=["older", "the same"])
def test_a_stale_version_is_refused_before_anything_is_given_up(version: int) -> None:
    engine = Residency(colocated=True)
    done(engine.sleep(3), engine.wake(3), engine.sync(3), engine.serve())
    with pytest.raises(MegagentError, match=f"version {version} are not newer than the engine's version 3"):
        done(engine.sleep(version))
    assert engine.phase is Phase.SERVING


def test_a_version_that_was_not_announced_is_refused() -> None:
    engine = Residency(colocated=False)
    done(engine.drain(4))
    with pytest.raises(MegagentError, match="version 5 came where version 4 was announced"):
        done(engine.sync(5))
    done(engine.sync(4))
    assert engine.version == 4


def test_a_second_sync_at_once_is_refused_and_the_first_goes_on() -> None:
    engine = Residency(colocated=False)
    with engine.drain(1), pytest.raises(MegagentError, match="engine is draining, which is still under way"):
        done(engine.drain(2))
    done(engine.sync(1), engine.serve())
    assert engine.version == 1


def test_a_placement_has_its_own_way_to_make_room() -> None:
    with pytest.raises(MegagentError, match="rollout.placement=disaggregated"):
        done(Residency(colocated=False).sleep())
    with pytest.raises(MegagentError, match="rollout.placement=colocated"):
        done(Residency(colocated=True).drain(1))


def test_a_failed_step_is_the_end() -> None:
    engine = Residency(colocated=False)
    done(engine.drain(1))
    with pytest.raises(OSError, match="down"), engine.sync(1):
        raise OSError("the network is down")
    with pytest.raises(InfrastructureError, match="unusable: syncing failed: the network is down; start a new one"):
        done(engine.serve())


def test_an_interrupted_step_is_the_end_too() -> None:
    engine = Residency(colocated=False)
    with pytest.raises(KeyboardInterrupt), engine.drain(1):
        raise KeyboardInterrupt
    assert engine.failure == "draining was interrupted"


def test_the_first_failure_is_the_one_that_is_told() -> None:
    engine = Residency(colocated=False)
    with engine.drain(1):
        engine.fail("the engine process died.")
    engine.fail("nobody answered")
    assert (engine.phase, engine.failure) == (Phase.UNUSABLE, "the engine process died")


def test_requests_wait_for_a_sync_under_way_and_not_for_one_that_nobody_began() -> None:
    engine = Residency(colocated=True)
    with engine.sleep(), pytest.raises(MegagentError, match="sleeps"):
        engine.require_requests()
    with pytest.raises(MegagentError, match="sync new ones"):
        engine.require_requests()
    with engine.wake(1):
        engine.require_requests()
    done(engine.sync(1))
    engine.require_requests()
    done(engine.serve())
    with engine.sleep(2):
        engine.require_requests()


RARE = st.integers(0, 99)  # what happens at one of these numbers only: failures would end most examples at once


class Orders(RuleBasedStateMachine):
    """Verbs in any order, with any version, inside each other, failing or not, against a few sentences of model.

    whole: the version whose weights the engine holds complete, None where it holds none or parts of two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = Residency(colocated=True)
        self.open: tuple[str, int, ExitStack] | None = None
        self.whole: int | None = 0
        self.last = 0
        self.failed = False

    @initialize(colocated=st.booleans())
    def place(self, colocated: bool) -> None:
        self.engine = Residency(colocated)

    @rule(verb=st.sampled_from(["sleep", "wake", "drain", "sync", "serve"]), ahead=st.sampled_from([1, 1, 1, 0, 2]))
    def begin(self, verb: str, ahead: int) -> None:
        version = self.last + ahead
        before = (self.engine.phase, self.engine.version, self.engine.failure)
        takes_version = verb in ("wake", "drain", "sync")
        stack = ExitStack()
        try:
            stack.enter_context(getattr(self.engine, verb)(*([version] if takes_version else [])))
        except MegagentError:
            assert (self.engine.phase, self.engine.version, self.engine.failure) == before
            return
        assert self.open is None, "two at once"
        assert not self.failed
        assert not takes_version or before[1] is None or version > self.last
        assert verb != "sync" or before[0] in (Phase.WEIGHTS_AWAKE, Phase.DRAINED)
        if verb in ("sleep", "sync"):
            self.whole = None
        self.open = (verb, version, stack)

    @precondition(lambda self: self.open is not None)
    @rule(luck=RARE)
    def end(self, luck: int) -> None:
        assert self.open is not None
        verb, version, stack = self.open
        self.open = None
        if luck == 57:
            error = RuntimeError("lost")
            stack.__exit__(RuntimeError, error, None)
            self.failed = True
            return
        stack.close()
        if verb == "sync" and not self.failed:
            self.whole = self.last = version

    @rule(luck=RARE)
    def die(self, luck: int) -> None:
        if luck == 57:
            self.engine.fail("killed")
            self.failed = True

    @invariant()
    def only_whole_weights_of_the_newest_version_are_served(self) -> None:
        if self.engine.phase is Phase.SERVING and self.open is None:
            assert self.whole == self.last
            assert (self.engine.version or 0) == self.last

    @invariant()
    def failure_is_for_good(self) -> None:
        assert (self.engine.phase is Phase.UNUSABLE) == self.failed


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
