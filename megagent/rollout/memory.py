"""What an agent remembers of its episode: the pages it saw and the actions it took there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One past step: the page that was shown (without history) and the action that was executed on it."""

    page: str
    action: str


class History:
    """The steps of one episode, oldest first, of which a prompt shows the last few.

    `length` is how many steps a prompt shows (env.history_length); 0 shows none. All steps are counted, only the
    last `length` are kept.
    """

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ValueError(f"history length is {length}; it is a number of steps, 0 or more")
        self._length = length
        self._taken = 0
        self._steps: list[Step] = []

    def add(self, page: str, action: str) -> None:
        """Remembers one executed step."""
        self._taken += 1
        if self._length:
            self._steps = [*self._steps, Step(page, action)][-self._length :]

    @property
    def taken(self) -> int:
        """Steps taken so far in the episode, also those that are no longer remembered."""
        return self._taken

    def last(self) -> tuple[Step, ...]:
        """The remembered steps, oldest first; at most `length`."""
        return tuple(self._steps)
