"""`megagent shop build`: shows how a catalogue is built, and what came of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from megagent.envs.webshop.build import Built, Progress, build_catalog

_LINE_EVERY = 30.0  # seconds, where a bar cannot be drawn
_STAGES = {"reading": "reading products", "indexing": "writing the search index", "writing": "writing the catalogue"}


def run(
    source: str,
    out: Path,
    *,
    skip_bad: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Built:
    """Builds the catalogue `source` into `out` and tells about it. Raises CatalogError; `out` is then as it was."""
    console = console or Console(stderr=True, highlight=False)
    with _Display(console) as display:
        built = build_catalog(
            source, Path(os.path.expanduser(out)), skip_bad=skip_bad, overwrite=overwrite, on_progress=display.update
        )
    for line in summary(built):
        console.print(line, soft_wrap=True, markup=False)
    return built


def summary(built: Built) -> list[str]:
    """What a build did, in lines."""
    lines = [text for text in (built.faults, built.notes) if text]
    if built.dropped:
        lines.append(f"{_products(built.dropped)} with faults {'was' if built.dropped == 1 else 'were'} left out")
    return [
        *lines,
        f"{built.path}: {_products(built.products)}, {filesize.decimal(built.size)}, in {built.seconds:,.1f} s",
        f"nouns of titles: {built.noun_source}; digest of the products: {built.digest[:16]}",
    ]


def _products(count: int) -> str:
    return f"{count:,} product{'' if count == 1 else 's'}"


class _Display:
    """A bar with products, rate and time left; without a terminal, a line every now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._last_line = time.monotonic()
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task(_STAGES["reading"], total=None, count="")

    def __enter__(self) -> _Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        rate = progress.products / max(now - self._began, 1e-9)
        count = f"{progress.products:,} products, {rate:,.0f}/s"
        # Only the reading can be foreseen; what follows is shown as going on.
        total = progress.size if progress.stage == "reading" and progress.size else None
        self._bars.update(
            self._task, description=_STAGES[progress.stage], completed=progress.read, total=total, count=count
        )
        if not self._console.is_terminal and now - self._last_line >= _LINE_EVERY:
            self._last_line = now
            done = f" ({progress.read / progress.size:.0%})" if total else ""
            self._console.print(f"{_STAGES[progress.stage]}{done}: {count}", soft_wrap=True, markup=False)
