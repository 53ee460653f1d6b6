"""What a run shows while it goes on: one line an iteration, lines of validation, progress bars below them.

On a terminal the table's lines scroll and the bars stay at the bottom. Elsewhere (a file, CI, Slurm) the same lines are
printed without bars, colours or control characters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


@dataclass(frozen=True)
class Column:
    title: str
    metric: str  # name in the metrics of an iteration
    form: str  # of format()
    scale: float = 1.0

    @property
    def width(self) -> int:
        return max(len(self.title), 8)

    def cell(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        return ("-" if value is None else format(value * self.scale, self.form)).rjust(self.width)


COLUMNS = (
    Column("success", "episode/success_rate", ".1f", 100),  # percent
    Column("length", "episode/length/mean", ".1f"),
    Column("reward", "episode/reward/mean", ".2f"),
    Column("kl", "actor/kl_loss", ".4f"),
    Column("entropy", "actor/entropy", ".3f"),
    Column("grad", "actor/grad_norm", ".3f"),
    Column("tokens/s", "rollout/tokens_per_s", ",.0f"),
    Column("seconds", "timing_s/iteration", ".1f"),
)
NUMBER_WIDTH = 5  # of the iteration
HEADER = " ".join(["it".rjust(NUMBER_WIDTH), *(column.title.rjust(column.width) for column in COLUMNS)])
HEADER_EVERY = 40  # lines: a long run's log repeats its header
VALIDATIONS = (("sampled", "val/sampled"), ("greedy", "val/greedy"))


class Console:
    """Prints to standard output. Use it as a context manager: the bars go away when it ends, however it ends."""

    def __init__(self, iterations: int, enabled: bool = True, terminal: Terminal | None = None) -> None:
        """iterations: of the whole run; enabled: False prints nothing at all."""
        self.iterations = iterations
        self.enabled = enabled
        self.terminal = terminal or Terminal(highlight=False, file=sys.stdout)
        self.live = enabled and self.terminal.is_terminal
        self._lines_since_header: int | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=self.terminal,
            transient=True,
            disable=not self.live,
            # Prints of other libraries stay theirs: redirecting them would break what they draw themselves.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._run = self._progress.add_task("run", total=iterations, count=f"0/{iterations}", visible=False)

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bars away; lines already printed stay."""
        self._progress.stop()

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Shows a bar for the length of the block. Yields a function that advances it by a number of units.

        total: units of the phase; None shows that something goes on, without a measure of how far it is.
        """
        task = self._progress.add_task(name, total=total, count="" if total is None else f"0/{total}")
        done = 0

        def advance(units: int = 1) -> None:
            nonlocal done
            done += units
            self._progress.update(task, completed=done, count=f"{done}" if total is None else f"{done}/{total}")

        try:
            yield advance
        finally:
            self._progress.remove_task(task)
            if self.live:
                self._progress.refresh()  # or the next line would be printed above a bar that is over

    def iteration(self, number: int, metrics: Mapping[str, float]) -> None:
        """The line of a finished iteration. metrics: by the names in COLUMNS; a missing one is shown as -."""
        cells = " ".join([str(number).rjust(NUMBER_WIDTH), *(column.cell(metrics) for column in COLUMNS)])
        self._header()
        self._print(cells)
        self._show_run(number)

    def validation(self, number: int, metrics: Mapping[str, float]) -> None:
        """The held-out success, sampled and greedy, with its 95% interval, of the policy after iteration `number`."""
        self._show_run(number)
        self._header()
        for title, prefix in VALIDATIONS:
            if f"{prefix}/success_rate" in metrics:
                rate, low, high = (metrics[f"{prefix}/success_{name}"] * 100 for name in ("rate", "low", "high"))
                text = f"held-out {title:<7} {rate:5.1f}% success  (95% interval {low:.1f}-{high:.1f}%"
                text += f", {metrics[f'{prefix}/tasks']:.0f} tasks)" if f"{prefix}/tasks" in metrics else ")"
                self._print(f"{number:>{NUMBER_WIDTH}} {text}", style="bold green")

    def note(self, text: str) -> None:
        """A line of its own: where files are, what is waited for."""
        self._print(text, style="dim")

    def warn(self, text: str) -> None:
        """A line that should not be missed."""
        self._print(f"warning: {text}", style="bold yellow")

    def _show_run(self, number: int) -> None:
        self._progress.update(self._run, completed=number, count=f"{number}/{self.iterations}", visible=True)

    def _header(self) -> None:
        if self._lines_since_header is None or self._lines_since_header >= HEADER_EVERY:
            self._print(HEADER, style="bold")
            self._lines_since_header = 0

    def _print(self, line: str, style: str = "") -> None:
        if not self.enabled:
            return
        if self._lines_since_header is not None:
            self._lines_since_header += 1
        if self.live:
            self.terminal.print(Text(line, style=style), soft_wrap=True)
            return
        # Not through rich: it would wrap long lines at the width of a terminal that is not there.
        print(line, file=self.terminal.file, flush=True)
