"""Recorded episodes: what the agent read, wrote and did, to be read by people and by tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagent.observe.files import write_whole

if TYPE_CHECKING:
    from megagent.rollout.episode import Episode, Step

Decode = Callable[[list[int]], str]


def write_episodes(path: Path, episodes: Sequence[Episode], decode: Decode | None = None) -> None:
    """One line of JSON an episode, in place of what the file held. decode: token ids to text, for the prompts."""
    lines = [json.dumps(_record(episode, decode), ensure_ascii=False) for episode in episodes]
    write_whole(path, "".join(f"{line}\n" for line in lines))


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """The episodes of a file that write_episodes wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _record(episode: Episode, decode: Decode | None) -> dict[str, Any]:
    return {
        "task": episode.task.key,
        "uid": episode.task.uid,
        "traj_uid": episode.traj_uid,
        "won": episode.won,
        "score": episode.score,
        "finished": episode.finished,
        "reward": episode.reward,
        "steps": [_step(index, step, decode) for index, step in enumerate(episode.steps)],
    }


def _step(index: int, step: Step, decode: Decode | None) -> dict[str, Any]:
    prompt = {} if decode is None else {"prompt": decode(step.prompt_ids)}
    return {
        "step": index,
        "page": step.page,
        **prompt,
        "response": step.text,
        "action": step.action,
        "valid": step.valid,
        "reward": step.reward,
        "prompt_tokens": len(step.prompt_ids),
        "response_tokens": len(step.response_ids),
    }
