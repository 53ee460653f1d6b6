"""Recorded episodes, as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def step(page: str, action: str, response: str = "<think>so</think>", **values: Any) -> dict[str, Any]:
    said = {"page": page, "response": response, "action": action, "reward": 0.0}
    return said | {"parsed": True, "admissible": True, "valid": True} | values


def episode(steps: Sequence[dict[str, Any]], **values: Any) -> dict[str, Any]:
    head = {"task": "key", "instruction": "find a red shirt", "traj_uid": "t/0/0", "won": True, "score": 1.0}
    return head | {"finished": True, "reward": 10.0, "steps": list(steps)} | values


PAGES = ("'Search'", "'Back to Search' [SEP] 'B123' [SEP] 'red shirt' [SEP] '$9.0'", "'red shirt' [SEP] 'Buy Now'")
SHOPPED = episode(
    [
        step(PAGES[0], "search[red shirt]"),
        step(PAGES[1], "click[b123]"),
        step(PAGES[2], "click[buy now]", reward=10.0),
    ]
)
WANDERED = episode(
    [step(PAGES[0], "dance", admissible=False, valid=False)],
    instruction="find a hat",
    won=False,
    score=0.0,
    finished=False,
    reward=0.0,
)


def write(path: Path, *episodes: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in episodes), encoding="utf-8")
    return path
