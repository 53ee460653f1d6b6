"""Real runs of the command line, and a look at every process that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from megagent.observe.recorder import read_metrics

MARK = "MEGAGENT_TEST_RUN"  # an environment variable that every process of a run inherits
# The whole pipeline on few and short episodes.
SMALL = (
    "experiment=webshop_tiny",
    "trainer.iterations=1",
    "trainer.tasks_per_iteration=2",
    "env.rollout.n=4",
    "trainer.mini_batch_rows=32",
    "trainer.micro_batch_rows=8",
    "trainer.log_prob_micro_batch_rows=16",
    "trainer.val_tasks=8",
    "cluster.timeout_s=240",
)


def _listens_to_interrupts() -> None:
    # A script that starts the tests with & has SIGINT ignored, and whatever is started from there inherits that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class LiveRun:
    """`megagent train` in a process group of its own."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.log = folder.parent / f"{folder.name}-{self.mark[:8]}.log"
        command = [sys.executable, "-m", "megagent.cli", "train", *SMALL, f"trainer.run_dir={folder}", *overrides]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_listens_to_interrupts,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def metrics(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def wait(self, timeout_s: float = 500) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run did not end within {timeout_s:.0f} s:\n{self.output()}") from None

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = 400) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                output = self.output()
                self.end()
                raise AssertionError(f"no {what} before the run ended or {timeout_s:.0f} s passed:\n{output}")
            time.sleep(0.2)

    def processes(self, but: tuple[str, ...] = ()) -> list[psutil.Process]:
        """Every living process that carries the run's mark, but those whose command line begins with one of `but`."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for process in psutil.process_iter():
            try:
                # Not psutil's environ(): a process that has set its title has written over the first variables, and
                # psutil reads no further than the first gap.
                marked = mark in Path(f"/proc/{process.pid}/environ").read_bytes()
                spared = but and " ".join(process.cmdline()).startswith(but)
                if marked and not spared and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def leftovers(self, within_s: float = 0.0, but: tuple[str, ...] = ()) -> list[str]:
        """What is still alive after `within_s` seconds at most: [] as soon as everything is gone."""
        deadline = time.monotonic() + within_s
        while (alive := self.processes(but)) and time.monotonic() < deadline:
            time.sleep(0.2)
        found = []
        for process in alive:
            try:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            except psutil.NoSuchProcess:
                continue
        return found

    def end(self) -> None:
        """Clean up after a failed test."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
