"""`megagent shop replay`: recorded episodes, in the terminal; serve.py shows the same in a browser."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from megagent.errors import MegagentError
from megagent.observe.episodes import RecordedEpisode, read_episodes
from megagent.shop import terminal


def main(path: Path, episode: int | None = None) -> None:
    """Prints the episodes of a file, or the one of that number, counted from 1.

    Raises MegagentError for a malformed file, naming the line, and for a number that it does not have.
    """
    show(chosen(path, episode), Console(highlight=False, file=sys.stdout))


def chosen(path: Path, episode: int | None) -> list[RecordedEpisode]:
    """All episodes of a file, or the one of that number, counted from 1."""
    episodes = read_episodes(path)
    if episode is None:
        return episodes
    if not 1 <= episode <= len(episodes):
        raise MegagentError(f"--episode {episode}: {path} holds episodes 1 to {len(episodes)}")
    return [episodes[episode - 1]]


def show(episodes: list[RecordedEpisode], console: Console) -> None:
    for number, episode in enumerate(episodes, start=1):
        console.print(terminal.recorded_head(episode, number, len(episodes)))
        for step in episode.steps:
            console.print(terminal.recorded_step(episode, step))
        console.print(terminal.recorded_end(episode))
        console.print()
