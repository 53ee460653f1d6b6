"""What a rank does around its parts; no Megatron."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import megagent.parallel
from megagent.config import Config
from megagent.parallel.rank import Rank


class Recorder:
    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self._calls.append(f"{self._name}.{method}")


@pytest.mark.parametrize("change", ["update", "supervised_update", "load"])
def test_weights_are_withdrawn_before_they_change(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    checkpoint = types.SimpleNamespace(load=lambda *_: calls.append("checkpoint.load"))
    monkeypatch.setitem(sys.modules, "megagent.parallel.checkpoint", checkpoint)  # type: ignore[arg-type]
    monkeypatch.setattr(megagent.parallel, "checkpoint", checkpoint, raising=False)
    rank = Rank(Config(), 0, 1, "127.0.0.1", 1)
    rank._policy, rank._sender = Recorder("policy", calls), Recorder("sender", calls)  # type: ignore[assignment]
    getattr(rank, change)(str(Path("folder")))
    assert calls == ["sender.withdraw", "checkpoint.load" if change == "load" else f"policy.{change}"]


def test_a_rank_that_closes_ends_its_part_of_the_sync() -> None:
    calls: list[str] = []
    rank = Rank(Config(), 0, 1, "127.0.0.1", 1)
    rank._sender = Recorder("sender", calls)  # type: ignore[assignment]
    rank.close()
    rank.close()
    assert calls == ["sender.close"]
