"""The projection of a sync onto links, by numbers that a reader can check by hand."""

from __future__ import annotations

import pytest

from benchmarks import sync_projection
from benchmarks.sync_projection import CASES, INTERCONNECTS, Interconnect, project
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard.spec import Device
from tests.parallel.models.configs import REAL

# 10 bytes/s to the node, 2 bytes/s to others, 4 between each two, memory that costs nothing.
LINKS = Interconnect("by hand", port=10.0, network=2.0, memory=float("inf"))
PAIRS = Interconnect("by hand", port=10.0, network=2.0, pair=4.0, memory=float("inf"))
NODE = (Device("a", 0), Device("a", 1), Device("b", 0))


@pytest.fixture(autouse=True)
def _nominal_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_projection, "EFFICIENCY", 1.0)
    monkeypatch.setattr(sync_projection, "ROUND_S", 0.0)


def seconds(traffic: dict[tuple[int, int], int], links: Interconnect = LINKS) -> float:
    return project(traffic, NODE, NODE, links, buffer_bytes=1).seconds


def test_a_port_is_as_busy_as_all_that_goes_through_it() -> None:
    assert seconds({(0, 1): 20}) == 2.0
    assert seconds({(0, 1): 20, (0, 2): 20}) == 10.0  # the network's port is the busier one
    assert seconds({(0, 2): 20, (1, 2): 20}) == 20.0  # both arrive at one port


def test_directions_and_ports_work_at_the_same_time() -> None:
    assert seconds({(0, 1): 20, (1, 0): 20}) == 2.0


def test_wires_of_a_pair_are_a_port_of_their_own() -> None:
    assert seconds({(0, 1): 20}, PAIRS) == 5.0


def test_what_stays_on_a_gpu_costs_memory_only() -> None:
    slow_memory = Interconnect("by hand", port=10.0, network=2.0, memory=8.0)
    # read and written by the sender, read and written by the receiver
    assert project({(0, 0): 4}, NODE, NODE, slow_memory, buffer_bytes=1).seconds == 2.0


def test_rounds_start_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_projection, "ROUND_S", 0.5)
    assert project({(0, 1): 20, (1, 0): 5}, NODE, NODE, LINKS, buffer_bytes=8).seconds == 2.0 + 3 * 0.5


def test_bytes_are_counted_by_how_far_they_go() -> None:
    found = project({(0, 0): 1, (0, 1): 2, (1, 0): 4, (0, 2): 8, (2, 1): 16}, NODE, NODE, LINKS, buffer_bytes=1)
    assert (found.same_gpu, found.same_node, found.network, found.moved) == (1, 6, 24, 31)


@pytest.mark.parametrize("case", CASES, ids=[case.model for case in CASES])
def test_cases_are_models_and_degrees_that_go_together(case: sync_projection.Case) -> None:
    architecture = architecture_of(REAL[case.model])
    assert architecture.problems(case.degrees) == []
    assert case.workers.problems(architecture) == []
    assert case.degrees.world == case.workers.tp * case.workers.pp * case.workers.engines
    for interconnect in INTERCONNECTS:
        spec = case.spec(interconnect, colocated=False)
        assert not {device.node for device in spec.sources} & {device.node for device in spec.targets}
