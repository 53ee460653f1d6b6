from __future__ import annotations

from pathlib import Path

import pytest

from megagent.errors import MegagentError
from megagent.observe.episodes import read_episodes
from megagent.shop import replay
from megagent.shop.sites import ReplaySite
from tests.shop.recordings import PAGES, SHOPPED, WANDERED, episode, step, write
from tests.shop.visitors import serving


def test_the_terminal_shows_every_step_of_every_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main(write(tmp_path / "e.jsonl", SHOPPED, WANDERED))
    printed = capsys.readouterr().out
    for text in ("find a red shirt", "Step 3 of 3", "<think>so</think>", "click[b123]", "reward 10", "find a hat"):
        assert text in printed
    assert "The episode ended after 3 steps: score 1.000, won." in printed
    assert "dance  (the page does not offer the action)" in printed
    assert "The episode ran out of its 1 steps: score 0, not won." in printed


def test_one_episode_can_be_picked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "e.jsonl", SHOPPED, WANDERED)
    replay.main(path, 2)
    printed = capsys.readouterr().out
    assert "find a hat" in printed
    assert "find a red shirt" not in printed


@pytest.mark.parametrize("number", [0, 3, -1])
def test_an_episode_that_is_not_there_is_told(tmp_path: Path, number: int) -> None:
    path = write(tmp_path / "e.jsonl", SHOPPED, WANDERED)
    with pytest.raises(MegagentError, match=rf"--episode {number}: .* holds episodes 1 to 2"):
        replay.main(path, number)


def test_what_a_model_wrote_moves_no_cursor_and_is_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = step("\x1b[2J [SEP] [red]x[/red]", "\x1b]0;title\x07", "\x9b31m[bold]y[/bold]")
    replay.main(write(tmp_path / "e.jsonl", episode([hostile], instruction="\x1b[1A")))
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\x07"} & set(printed)
    assert "[red]x[/red]" in printed
    assert "[bold]y[/bold]" in printed


def test_the_web_page_is_given_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "e.jsonl", SHOPPED, WANDERED)
    with serving(ReplaySite(read_episodes(path), path.name)) as client:
        site = client.get("api/site")
        assert (site["kind"], site["title"], len(site["episodes"])) == ("replay", "e.jsonl", 2)
        shown = client.get("api/episodes/0")
        assert shown["verdict"].endswith("won.")
        assert [each["page"] for each in shown["steps"]] == list(PAGES)
        assert shown["steps"][2]["segments"] == ["red shirt", "Buy Now"]


@pytest.mark.parametrize("path", ["api/episodes/2", "api/episodes/-1", "api/episodes/x", "api/episodes/", "api/visits"])
def test_what_is_not_recorded_is_not_found(tmp_path: Path, path: str) -> None:
    episodes = read_episodes(write(tmp_path / "e.jsonl", SHOPPED, WANDERED))
    with serving(ReplaySite(episodes, "e")) as client:
        assert client.refusal(client.get, path)[0] == 404


def test_recorded_episodes_cannot_be_changed(tmp_path: Path) -> None:
    episodes = read_episodes(write(tmp_path / "e.jsonl", SHOPPED))
    with serving(ReplaySite(episodes, "e")) as client:
        assert client.refusal(client.post, "api/visits", {})[0] == 405
