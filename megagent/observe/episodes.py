"""Recorded episodes: what the agent read, wrote and did, to be read by people and by tools."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megagent.errors import MegagentError
from megagent.observe.files import write_whole

if TYPE_CHECKING:
    from megagent.rollout.episode import Episode, Step

Decode = Callable[[list[int]], str]
Value = TypeVar("Value")

_LARGEST = 2**53  # of whole numbers that a float holds exactly

_KINDS = {str: "a text", bool: "true or false", float: "a finite number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One prompt, one reply, and what became of it."""

    number: int  # in the episode, from 0
    page: str  # the state as the agent read it, without task and history
    prompt: str  # "" where the prompts were not recorded as text
    response: str
    action: str
    parsed: bool  # the reply had the form that was asked for
    admissible: bool  # the page offered the action
    valid: bool  # what the penalty went by
    reward: float

    @property
    def fault(self) -> str:
        """What was wrong with the reply, in words; empty if nothing was."""
        faults = [] if self.parsed else ["the reply does not parse"]
        return ", ".join(faults if self.admissible else [*faults, "the page does not offer the action"])


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """One attempt at a task."""

    task: str  # the task's key
    instruction: str  # what was asked for, in words
    traj_uid: str
    won: bool
    score: float  # the environment's own, 0 to 1
    finished: bool  # False: it ran into env.max_steps
    reward: float
    steps: tuple[RecordedStep, ...]

    @property
    def verdict(self) -> str:
        """The end in a sentence."""
        if not self.finished:
            return f"The episode ran out of its {len(self.steps)} steps: score 0, not won."
        return (
            f"The episode ended after {len(self.steps)} steps: score {self.score:.3f}, {'' if self.won else 'not '}won."
        )


def write_episodes(path: Path, episodes: Sequence[Episode], decode: Decode | None = None) -> None:
    """One line of JSON an episode, in place of what the file held. decode: token ids to text, for the prompts."""
    lines = [json.dumps(_record(episode, decode), ensure_ascii=False) for episode in episodes]
    write_whole(path, "".join(f"{line}\n" for line in lines))


def read_episodes(path: Path) -> list[RecordedEpisode]:
    """The episodes of a file that write_episodes wrote.

    Raises MegagentError for a file that cannot be read, has no episodes, or holds a line that is not one: the sentence
    names the line.
    """
    try:
        # Not splitlines: replies may hold other line separators than the line feed.
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise MegagentError(f"{path}: {error.strerror or error}; give a file of recorded episodes") from error
    episodes = [_episode(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not episodes:
        raise MegagentError(f"{path}: no episodes in it; give a file of a run's episodes folder")
    return episodes


def _record(episode: Episode, decode: Decode | None) -> dict[str, Any]:
    return {
        "task": episode.task.key,
        "instruction": episode.instruction,
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
        "parsed": step.parsed,
        "admissible": step.admissible,
        "valid": step.valid,
        "reward": step.reward,
        "prompt_tokens": len(step.prompt_ids),
        "response_tokens": len(step.response_ids),
    }


def _episode(line: bytes, where: str) -> RecordedEpisode:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise MegagentError(f"{where}: not an episode, for it is not JSON ({error})") from None
    steps = _field(record, "steps", list, where)
    task = _field(record, "task", str, where)
    return RecordedEpisode(
        task=task,
        instruction=_field(record, "instruction", str, where) or task,
        traj_uid=_field(record, "traj_uid", str, where),
        won=_field(record, "won", bool, where),
        score=_field(record, "score", float, where),
        finished=_field(record, "finished", bool, where),
        reward=_field(record, "reward", float, where),
        steps=tuple(_recorded_step(number, step, f"{where}, step {number}") for number, step in enumerate(steps)),
    )


def _recorded_step(number: int, record: Any, where: str) -> RecordedStep:
    return RecordedStep(
        number=number,
        page=_field(record, "page", str, where),
        prompt=_field(record, "prompt", str, where) if isinstance(record, dict) and "prompt" in record else "",
        response=_field(record, "response", str, where),
        action=_field(record, "action", str, where),
        parsed=_field(record, "parsed", bool, where),
        admissible=_field(record, "admissible", bool, where),
        valid=_field(record, "valid", bool, where),
        reward=_field(record, "reward", float, where),
    )


def _field(record: Any, name: str, kind: type[Value], where: str) -> Value:
    """The value of a field, of the kind that it must have; a whole number is a number too, true is not."""
    if not isinstance(record, dict):
        raise MegagentError(f"{where}: not an object, but {_shortened(record)}")
    if name not in record:
        raise MegagentError(f"{where}: the field {name} is missing; is this a file of recorded episodes?")
    value = record[name]
    if kind is float and type(value) is int and abs(value) <= _LARGEST:
        value = float(value)
    # JSON as Python reads it has NaN and Infinity, a browser's has not.
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise MegagentError(f"{where}: the field {name} must be {_KINDS[kind]}, not {_shortened(value)}")
    return value


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
