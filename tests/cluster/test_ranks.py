from __future__ import annotations

import socket

import pytest
import torch

from megagent.algos.shares import Share
from megagent.batch import Jagged, StepBatch
from megagent.cluster import ranks
from megagent.config import Config
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


@pytest.mark.parametrize("micro_batch_tokens", [0, 64])
def test_answers_of_the_speaking_ranks_come_back_in_the_order_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, micro_batch_tokens: int
):
    config = Config()
    config.model.path = "builtin:webshop_tiny"
    config.parallel.tp, config.parallel.dp, config.parallel.pp = 2, 2, 2
    config.trainer.micro_batch_tokens = micro_batch_tokens
    lengths = torch.tensor([3, 30, 1, 17, 20, 5, 9, 2])
    tokens = Jagged(torch.arange(int(lengths.sum())), lengths)
    rows = StepBatch({"prompts": tokens, "responses": tokens})

    group = object.__new__(ranks.RankGroup)
    group.config = config

    def answers(method: str, rows: StepBatch, shares: list[Share], *_: object) -> list[dict[str, Jagged] | None]:
        """Each rank's rows as its log-probs, from the first tensor rank of the last stage."""
        speaks = {4: 0, 6: 1}  # rank -> replica: tp fastest, then dp, then pp
        return [
            {"log_probs": shares[speaks[rank]].of(rows)["responses"]} if rank in speaks else None for rank in range(8)
        ]

    monkeypatch.setattr(group, "_call_on_rows", answers)
    found = group.log_probs(rows, "actor")["log_probs"]
    assert torch.equal(found.values, tokens.values)
    assert torch.equal(found.lengths, lengths)
