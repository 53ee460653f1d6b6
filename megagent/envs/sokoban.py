"""Sokoban: push every box onto a target. A whole environment in one file, and an example of one.

Rooms are generated backwards: boxes stand on their targets and are pulled away, so the way back is a solution that is
no longer than the moves it took.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megagent.config import EnvConfig, number
from megagent.envs.base import SPLITS, Observation, Split, StepResult, Task, draw_tasks
from megagent.errors import ConfigError, MegagentError

Cell = tuple[int, int]  # (row, column)

MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WALL, FLOOR, TARGET, BOX, PLAYER, BOX_ON_TARGET, PLAYER_ON_TARGET = "#_.$@*+"
MARKS = "".join((WALL, FLOOR, TARGET, BOX, PLAYER, BOX_ON_TARGET, PLAYER_ON_TARGET))
ASKED = "push every box ($) onto a target (.)"

_WALL_SHARE = 0.15  # of the cells inside the outer walls
_MOST_FRUITLESS = 5000  # rooms made in a row that are of no use, before it is said that there are no more


@dataclass
class SokobanConfig(EnvConfig):
    """`env` when env.name=sokoban."""

    name: str = "sokoban"
    prompt: str = "sokoban"
    size: int = number(6, 5, 20)  # rows and columns of a room, outer walls included
    boxes: int = number(1, 1, 8)
    moves: int = number(10, 1)  # every room can be solved in at most so many
    rooms: int = number(512, 1, 100_000)  # of the train panel; each of the others has a quarter as many

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.moves > self.max_steps:
            fix = f"lower it, or set env.max_steps={self.moves}"
            yield "moves", f"env.moves={self.moves}: an episode ends after env.max_steps={self.max_steps}; {fix}"
        most = (self.size - 2) ** 2 // 3
        if 1 <= most < self.boxes:
            fix = f"raise env.size or set env.boxes={most}"
            yield "boxes", f"env.boxes={self.boxes}: too many for a room of env.size={self.size}; {fix}"


@dataclass(frozen=True, slots=True)
class Room:
    """One position of a game."""

    rows: int
    columns: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @classmethod
    def parse(cls, text: str) -> Room:
        """The position that `str` drew; rows end with a newline or a slash. Raises MegagentError if it is none."""
        lines = text.replace("/", "\n").split("\n")
        cells = {(row, column): mark for row, line in enumerate(lines) for column, mark in enumerate(line)}
        found = {mark: frozenset(cell for cell, there in cells.items() if there == mark) for mark in MARKS}
        players = found[PLAYER] | found[PLAYER_ON_TARGET]
        boxes = found[BOX] | found[BOX_ON_TARGET]
        targets = found[TARGET] | found[BOX_ON_TARGET] | found[PLAYER_ON_TARGET]
        is_grid = len({len(line) for line in lines}) == 1 and sum(map(len, found.values())) == len(cells)
        if not is_grid or len(players) != 1 or not boxes or len(boxes) != len(targets):
            raise MegagentError(
                f"{text!r} is not a Sokoban room: rows of equal length made of {MARKS}, with one player and as many "
                "boxes as targets"
            )
        [player] = players
        return cls(len(lines), len(lines[0]), found[WALL], targets, boxes, player)

    def __str__(self) -> str:
        return "\n".join(
            "".join(self._mark((row, column)) for column in range(self.columns)) for row in range(self.rows)
        )

    def _mark(self, cell: Cell) -> str:
        if cell in self.walls:
            return WALL
        on_target = cell in self.targets
        if cell in self.boxes:
            return BOX_ON_TARGET if on_target else BOX
        if cell == self.player:
            return PLAYER_ON_TARGET if on_target else PLAYER
        return TARGET if on_target else FLOOR

    @property
    def placed(self) -> float:
        """Share of the boxes that are on a target."""
        return len(self.boxes & self.targets) / len(self.boxes)

    def is_free(self, cell: Cell) -> bool:
        row, column = cell
        inside = 0 <= row < self.rows and 0 <= column < self.columns
        return inside and cell not in self.walls and cell not in self.boxes

    def moved(self, move: Cell) -> Room:
        """After a move of the player, which pushes a box that is in the way; the same room if that is impossible."""
        there = _added(self.player, move)
        boxes = self.boxes
        if there in boxes:
            beyond = _added(there, move)
            if not self.is_free(beyond):
                return self
            boxes = boxes - {there} | {beyond}
        elif not self.is_free(there):
            return self
        return self._with(boxes, there)

    def before(self) -> list[Room]:
        """Every position from which one move leads to this one: the player steps back, and may pull a box along."""
        found = []
        for row, column in MOVES.values():
            back, ahead = _added(self.player, (row, column)), _added(self.player, (-row, -column))
            if self.is_free(back):
                found.append(self._with(self.boxes, back))
                if ahead in self.boxes:
                    found.append(self._with(self.boxes - {ahead} | {self.player}, back))
        return found

    def _with(self, boxes: frozenset[Cell], player: Cell) -> Room:
        return Room(self.rows, self.columns, self.walls, self.targets, boxes, player)


def _added(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


def random_room(size: int, boxes: int, moves: int, rng: random.Random) -> Room | None:
    """A room that is not solved yet and that `moves` moves solve; None if this try gave none."""
    cells = [(row, column) for row in range(size) for column in range(size)]
    inside = [cell for cell in cells if 0 < cell[0] < size - 1 and 0 < cell[1] < size - 1]
    floor = [cell for cell in inside if rng.random() >= _WALL_SHARE]
    if len(floor) <= 2 * boxes:
        return None
    *targets, player = rng.sample(floor, boxes + 1)
    on_targets = frozenset(targets)
    room = Room(size, size, frozenset(cells) - frozenset(floor), on_targets, on_targets, player)
    seen = {room}
    for _ in range(moves):
        earlier = [other for other in room.before() if other not in seen]
        if not earlier:
            break
        room = rng.choice(earlier)
        seen.add(room)
    return None if room.placed == 1 else room


class SokobanWorld:
    """The panels of rooms. A task's key is its room, so a process that only plays makes no rooms."""

    def __init__(self, config: SokobanConfig) -> None:
        self.config = config

    @cached_property
    def _panels(self) -> dict[Split, list[Task]]:
        """Rooms are dealt to the panels by a hash of what they look like, so that no room is in two of them."""
        config = self.config
        quarter = max(1, config.rooms // 4)
        wanted: dict[Split, int] = {split: config.rooms if split == "train" else quarter for split in SPLITS}
        shares = [split for split in SPLITS for _ in range(4 if split == "train" else 1)]
        panels: dict[Split, list[Task]] = {split: [] for split in SPLITS}
        seen: set[str] = set()
        rng = random.Random(f"sokoban {config.size} {config.boxes} {config.moves}")
        fruitless = 0
        while any(len(panels[split]) < wanted[split] for split in SPLITS):
            fruitless += 1
            if fruitless > _MOST_FRUITLESS:
                found = f"only {len(panels['train'])} different ones of env.size={config.size} were found"
                raise ConfigError([f"env.rooms={config.rooms}: {found}; lower it, or raise env.size or env.moves"])
            room = random_room(config.size, config.boxes, config.moves, rng)
            if room is None or (key := str(room).replace("\n", "/")) in seen:
                continue
            seen.add(key)
            digest = hashlib.sha256(key.encode()).hexdigest()
            split = shares[int(digest[:13], 16) % len(shares)]
            if len(panels[split]) < wanted[split]:
                panels[split].append(Task(f"sokoban-{digest[:16]}", split, key))
                fruitless = 0
        return panels

    @property
    def digest(self) -> str:
        lines = [f"{split} {task.key}" for split in SPLITS for task in self._panels[split]]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._panels[split]

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]:
        return draw_tasks(self.tasks(split), count, seed, iteration)

    def make(self) -> Sokoban:
        return Sokoban(self.config.success_reward)


class Sokoban:
    """One game after the other. Won when every box is on a target; only that ends a game."""

    def __init__(self, success_reward: float) -> None:
        self._success_reward = success_reward
        self._room: Room | None = None

    def reset(self, task: Task) -> Observation:
        """Raises MegagentError if the task's key is not a room."""
        self._room = Room.parse(task.key)
        return self._observe(self._room)

    def step(self, action: str) -> StepResult:
        if self._room is None:
            raise MegagentError("the environment has no episode yet; call reset(task) first")
        if self._room.placed == 1:
            raise MegagentError("the episode has ended; call reset(task) to begin the next one")
        move = MOVES.get(action)
        self._room = self._room.moved(move) if move else self._room
        won = self._room.placed == 1
        reward = self._success_reward if won else 0.0
        return StepResult(self._observe(self._room), reward, done=won, won=won, score=float(won))

    @staticmethod
    def _observe(room: Room) -> Observation:
        return Observation(ASKED, str(room), tuple(MOVES))
