from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megagent.envs.base import Task
from megagent.errors import MegagentError
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
    return Episode(
        Task("train-1", "train", "shirt-1"),
        "train-1/0/0",
        [step],
        instruction="a red shirt",
        won=True,
        score=1.0,
        finished=True,
    )


def test_a_step_says_what_was_read_written_and_done(tmp_path: Path, episode: Episode) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode])
    record = json.loads((tmp_path / "e.jsonl").read_text(encoding="utf-8"))
    assert (record["task"], record["instruction"]) == ("shirt-1", "a red shirt")
    assert (record["won"], record["reward"]) == (True, 10.0)
    assert record["steps"] == [
        {
            "step": 0,
            "page": "Search",
            "response": episode.steps[0].text,
            "action": "click[buy now]",
            "parsed": True,
            "admissible": True,
            "valid": True,
            "reward": 10.0,
            "prompt_tokens": 3,
            "response_tokens": 2,
        }
    ]


def test_what_is_written_is_read_again(tmp_path: Path, episode: Episode) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode, episode])
    first, second = read_episodes(tmp_path / "e.jsonl")
    assert first == second
    assert (first.task, first.instruction, first.traj_uid) == ("shirt-1", "a red shirt", "train-1/0/0")
    assert (first.won, first.score, first.finished, first.reward) == (True, 1.0, True, 10.0)
    (step,) = first.steps
    assert (step.number, step.page, step.prompt, step.response) == (0, "Search", "", episode.steps[0].text)
    assert (step.action, step.parsed, step.admissible, step.valid) == ("click[buy now]", True, True, True)
    assert (step.fault, step.reward) == ("", 10.0)
    assert first.verdict == "The episode ended after 1 steps: score 1.000, won."


@pytest.mark.parametrize(
    ("parsed", "admissible", "fault"),
    [
        (False, True, "the reply does not parse"),
        (True, False, "the page does not offer the action"),
        (False, False, "the reply does not parse, the page does not offer the action"),
    ],
)
def test_what_is_wrong_with_a_reply_is_told(
    tmp_path: Path, episode: Episode, parsed: bool, admissible: bool, fault: str
) -> None:
    episode.steps[0].parsed, episode.steps[0].admissible = parsed, admissible
    write_episodes(tmp_path / "e.jsonl", [episode])
    assert read_episodes(tmp_path / "e.jsonl")[0].steps[0].fault == fault


def test_prompts_are_recorded_as_text_where_they_can_be_decoded(tmp_path: Path, episode: Episode) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode], decode=lambda ids: " ".join(map(str, ids)))
    assert read_episodes(tmp_path / "e.jsonl")[0].steps[0].prompt == "5 6 7"


def test_an_episode_is_one_line_and_readable_as_it_is(tmp_path: Path, episode: Episode) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode, episode])
    text = (tmp_path / "e.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 2
    assert "café" in text


def without(name: str, **values: Any) -> Any:
    return lambda record: {key: value for key, value in record.items() if key != name} | values


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without("won"), "line 2: the field won is missing; is this a file of recorded episodes?"),
        (without("", won=1), "line 2: the field won must be true or false, not 1"),
        (without("", score=True), "line 2: the field score must be a finite number, not true"),
        (without("", score=float("nan")), "line 2: the field score must be a finite number, not NaN"),
        (without("", score=10**400), f"line 2: the field score must be a finite number, not 1{'0' * 39}..."),
        (without("", steps={"a": 1}), 'line 2: the field steps must be a list, not {"a": 1}'),
        (without("", steps=["x" * 99]), f'line 2, step 0: not an object, but "{"x" * 39}...'),
        (without("", steps=[{}]), "line 2, step 0: the field page is missing; is this a file of recorded episodes?"),
        (lambda record: [record["uid"]], 'line 2: not an object, but ["train-1"]'),
    ],
)
def test_a_line_that_is_no_episode_is_named(tmp_path: Path, episode: Episode, damage: Any, told: str) -> None:
    path = tmp_path / "e.jsonl"
    write_episodes(path, [episode])
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(f"{json.dumps(record)}\n{json.dumps(damage(record))}\n", encoding="utf-8")
    with pytest.raises(MegagentError) as failed:
        read_episodes(path)
    assert str(failed.value) == f"{path}, {told}"


@pytest.mark.parametrize("content", [b'{"task": ', b"\xff\xfe", b"[" * 100000, b"Iteration 3 done"])
def test_a_line_that_is_not_json_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(content)
    with pytest.raises(MegagentError, match=r"line 1: not an episode, for it is not JSON \([^\n]*\)$"):
        read_episodes(path)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_episodes_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "e.jsonl").write_bytes(content)
    with pytest.raises(MegagentError, match="no episodes in it"):
        read_episodes(tmp_path / "e.jsonl")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(MegagentError, match="give a file of recorded episodes"):
            read_episodes(path)
