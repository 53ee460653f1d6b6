"""Sokoban: the rules of the game, and rooms that can be solved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs import sokoban
from megagent.envs.base import SPLITS, Task, build_world
from megagent.envs.sokoban import MOVES, Room, SokobanConfig, SokobanWorld
from megagent.errors import ConfigError, MegagentError


def drawn(*rows: str) -> str:
    return "\n".join(rows)


def after(room: str, *moves: str) -> str:
    position = Room.parse(room)
    for move in moves:
        position = position.moved(MOVES[move])
    return str(position)


def test_the_player_pushes_a_box_onto_a_target() -> None:
    assert after(drawn("#####", "#@$.#", "#####"), "right") == drawn("#####", "#_@*#", "#####")


def test_a_box_comes_off_its_target_and_the_player_may_stand_there() -> None:
    assert after(drawn("######", "#@*_.#", "#_$__#", "######"), "right") == drawn(
        "######", "#_+$.#", "#_$__#", "######"
    )


@pytest.mark.parametrize("row", ["#@#$.#", "#@$#.#", "#@$$..#"])
def test_nothing_moves_into_a_wall_or_two_boxes(row: str) -> None:
    room = drawn("#" * len(row), row, "#" * len(row))
    assert after(room, "right") == room


def test_a_room_without_an_outer_wall_has_an_edge() -> None:
    assert after("@_$.", "left") == "@_$."
    assert after("._@$", "right") == "._@$"


@pytest.mark.parametrize("text", ["", "#@$.#\n##", "#@$.x", "@@$.", "@$_", "@", "$."])
def test_what_is_no_room_is_refused(text: str) -> None:
    with pytest.raises(MegagentError, match="is not a Sokoban room"):
        Room.parse(text)


def test_an_episode_is_won_when_every_box_is_in_place() -> None:
    environment = build_world(SokobanConfig(success_reward=10)).make()
    first = environment.reset(Task("sokoban-x", "train", "######/#@$_.#/######"))
    assert (first.page, first.admissible) == (drawn("######", "#@$_.#", "######"), ("up", "down", "left", "right"))
    result = environment.step("right")
    assert (result.reward, result.done, result.score) == (0, False, 0)
    result = environment.step("right")
    assert (result.reward, result.done, result.won, result.score) == (10, True, True, 1)
    with pytest.raises(MegagentError, match="the episode has ended"):
        environment.step("left")


@pytest.mark.parametrize("action", ["", "Right", "push", "right right", "\x00"])
def test_an_action_of_another_name_changes_nothing(action: str) -> None:
    environment = build_world(SokobanConfig()).make()
    first = environment.reset(Task("sokoban-x", "train", "#####/#@$.#/#####"))
    assert environment.step(action).observation == first


def solution_length(room: Room, most: int) -> int | None:
    """Moves of the shortest solution, by breadth-first search."""
    seen, waiting = {room}, deque([(room, 0)])
    while waiting:
        position, taken = waiting.popleft()
        if position.placed == 1:
            return taken
        if taken < most:
            for move in MOVES.values():
                if (later := position.moved(move)) not in seen:
                    seen.add(later)
                    waiting.append((later, taken + 1))
    return None


def test_every_room_can_be_solved_in_env_moves() -> None:
    world = SokobanWorld(SokobanConfig(rooms=100))
    lengths = [solution_length(Room.parse(task.key), 10) for split in SPLITS for task in world.tasks(split)]
    assert all(length is not None and length >= 1 for length in lengths)


TWO_BOXES = SokobanWorld(SokobanConfig(rooms=100, boxes=2))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(index=st.integers(0, 99), moves=st.lists(st.sampled_from(sorted(MOVES)), max_size=20))
def test_no_move_loses_a_box_or_walks_through_a_wall(index: int, moves: list[str]) -> None:
    room = Room.parse(TWO_BOXES.tasks("train")[index].key)
    for move in moves:
        later = room.moved(MOVES[move])
        assert len(later.boxes) == 2
        assert later.player not in later.walls | later.boxes
        assert not later.boxes & later.walls
        assert Room.parse(str(later)) == later
        room = later


def test_panels_have_their_sizes_and_share_no_room() -> None:
    world = SokobanWorld(SokobanConfig(rooms=40))
    panels = {split: {task.key for task in world.tasks(split)} for split in SPLITS}
    assert [len(panels[split]) for split in ("warmup", "train", "validation", "test")] == [10, 40, 10, 10]
    assert len(set().union(*panels.values())) == 70
    assert all(task.split == split for split in SPLITS for task in world.tasks(split))


def test_another_process_makes_the_same_rooms() -> None:
    script = "from megagent.envs.sokoban import *; print(SokobanWorld(SokobanConfig()).digest)"
    command = [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert shown.strip() == SokobanWorld(SokobanConfig()).digest


def test_more_rooms_than_there_are_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sokoban, "_MOST_FRUITLESS", 500)
    with pytest.raises(ConfigError, match=r"env.rooms=3000: only \d+ different ones of env.size=5 were found"):
        SokobanWorld(SokobanConfig(size=5, moves=1, rooms=3000)).tasks("train")
