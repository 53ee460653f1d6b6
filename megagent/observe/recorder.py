"""Where a run's figures go: metrics.jsonl, TensorBoard, the console, recorded episodes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from megagent.config import Config
from megagent.errors import MegagentError
from megagent.observe.console import Console
from megagent.observe.episodes import Decode, write_episodes
from megagent.observe.files import write_whole
from megagent.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from megagent.rollout.episode import Episode


class Recorder:
    """Takes the figures of a run and puts them where config.logger says. Metric names are verl's where it has them.

    Use it as a context manager, so that the last events reach the disk and the console is left in order.
    """

    def __init__(self, folder: RunFolder, config: Config, decode: Decode | None = None) -> None:
        """decode: token ids to text, so that recorded episodes hold their prompts."""
        self.folder = folder
        finished = folder.finished_iterations
        _drop_after(folder.metrics, finished)
        self.console = Console(config.trainer.iterations, enabled=config.logger.console)
        self._decode = decode
        self._metrics = _open_to_append(folder.metrics)
        self._board = _open_board(folder.tensorboard, finished) if config.logger.tensorboard else None

    def __enter__(self) -> Recorder:
        self.console.__enter__()
        self.console.note(f"run folder: {self.folder.root}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.console.close()
        self._metrics.close()
        if self._board is not None:
            self._board.close()

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Shows a progress bar for the length of the block; yields a function that advances it by units."""
        return self.console.phase(name, total)

    def warn(self, text: str) -> None:
        """Shows a line that should not be missed; it is not recorded."""
        self.console.warn(text)

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures of a finished iteration, recorded and shown."""
        self.record(iteration, metrics)
        self.console.iteration(iteration, metrics)

    def validation(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The held-out figures of the policy after `iteration` (0: before the first), recorded and shown."""
        self.record(iteration, metrics)
        self.console.validation(iteration, metrics)

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl and one point on every curve.

        A figure that is not finite is null in the file, which keeps it JSON, and as it is in TensorBoard.
        """
        figures = {name: float(value) for name, value in metrics.items()}
        line: dict[str, Any] = {"step": iteration, "time": round(time.time(), 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(name, value, iteration)
            self._board.flush()

    def episodes(self, iteration: int, temperature: float, episodes: Sequence[Episode]) -> None:
        """Writes episodes/iteration-0006-sampled.jsonl, or -greedy at temperature 0."""
        if episodes:
            kind = "greedy" if temperature == 0 else "sampled"
            write_episodes(self.folder.episodes / f"iteration-{iteration:04d}-{kind}.jsonl", episodes, self._decode)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in the order written; a last line torn by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _open_to_append(path: Path) -> TextIO:
    """Opens a file of lines; a last line that a crash left unfinished does not swallow the next one."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by Recorder.close)
    if torn:
        file.write("\n")
    return file


def _drop_after(path: Path, finished: int) -> None:
    """Removes the records of iterations that a resumed run does again: those after the newest checkpoint."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if finished > 0 and record["step"] <= finished]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def _open_board(path: Path, finished: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MegagentError(
            f"logger.tensorboard=true: TensorBoard cannot be imported ({error}). "
            "Install megagent[cpu] or [gpu], or set logger.tensorboard=false."
        ) from error
    # Points after the newest checkpoint are of iterations that are done again.
    return SummaryWriter(str(path), purge_step=finished + 1 if finished else None)
