from __future__ import annotations

from pathlib import Path

import pytest

from megagent.envs.base import Task
from megagent.observe.episodes import read_episodes, write_episodes
from megagent.rollout.episode import Episode, Step


@pytest.fixture
def episode() -> Episode:
    step = Step(
        page="Search",
        prompt_ids=[5, 6, 7],
        response_ids=[8, 9],
        log_probs=[-0.1, -0.2],
        text="<think>café\u2028now</think><action>click[buy now]</action>",
        action="click[buy now]",
        parsed=True,
        admissible=True,
        valid=True,
        reward=10.0,
    )
    return Episode(Task("train-1", "train", "a red shirt"), "train-1/0/0", [step], won=True, score=1.0, finished=True)


def test_a_step_says_what_was_read_written_and_done(tmp_path: Path, episode: Episode) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode])
    (record,) = read_episodes(tmp_path / "e.jsonl")
    assert (record["task"], record["won"], record["reward"]) == ("a red shirt", True, 10.0)
    assert record["steps"] == [
        {
            "step": 0,
            "page": "Search",
            "response": episode.steps[0].text,
            "action": "click[buy now]",
            "valid": True,
            "reward": 10.0,
            "prompt_tokens": 3,
            "response_tokens": 2,
        }
    ]


def test_prompts_are_recorded_as_text_where_they_can_be_decoded(tmp_path: Path, episode: Episode) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode], decode=lambda ids: " ".join(map(str, ids)))
    assert read_episodes(tmp_path / "e.jsonl")[0]["steps"][0]["prompt"] == "5 6 7"


def test_an_episode_is_one_line_and_readable_as_it_is(tmp_path: Path, episode: Episode) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode, episode])
    text = (tmp_path / "e.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 2
    assert "café" in text
