from __future__ import annotations

import socket

import pytest

from megagent.cluster import ranks
from megagent.errors import InfrastructureError


def test_the_port_of_rank_0_is_free_and_not_one_that_connections_are_given():
    port = ranks.free_port("127.0.0.1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    assert port in ranks.RENDEZVOUS_PORTS
    assert port < 32768


def test_no_free_port_is_told(monkeypatch: pytest.MonkeyPatch):
    def taken(*_: object) -> None:
        raise OSError("address already in use")

    monkeypatch.setattr(socket.socket, "bind", taken)
    with pytest.raises(InfrastructureError, match="none of 100 ports between 22000 and 31999 is free on 127.0.0.1"):
        ranks.free_port("127.0.0.1")
