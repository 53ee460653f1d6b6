"""A bar with bytes, rate and time left; where nobody watches a terminal, a line every half minute."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType

_EVERY = 30.0  # seconds between lines
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Progress:
    """A context manager; `add(bytes)` as they are done. Writes to stderr, nothing with quiet."""

    def __init__(self, what: str, total: int, done: int = 0, quiet: bool = False) -> None:
        self._what, self._total, self._already, self._done = what, total, done, done
        self._quiet = quiet
        self._start = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self._terminal and not self._quiet:
            _print("\n")

    def add(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._shown >= (0.1 if self._terminal else _EVERY):
            self._shown = now
            self._show()

    @property
    def line(self) -> str:
        seconds = time.monotonic() - self._start
        rate = (self._done - self._already) / seconds if seconds > 0 else 0.0
        share = self._done / self._total if self._total else 1.0
        left = (self._total - self._done) / rate if rate else 0.0
        bar = "#" * round(24 * share)
        minutes, rest = divmod(round(left), 60)
        return (
            f"{self._what} [{bar:24}] {share:4.0%}  {_bytes(self._done)} of {_bytes(self._total)}  "
            f"{_bytes(rate)}/s  {minutes}:{rest:02d} left"
        )

    def _show(self) -> None:
        if self._quiet:
            return
        if self._terminal:
            _print(f"\r{self.line}\033[K")
        else:
            _print(f"{self.line}\n")


def _print(text: str) -> None:
    # A log that is full or gone is no reason to stop.
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def _bytes(count: float) -> str:
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
