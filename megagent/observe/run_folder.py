"""The folder of one run: what lies where, and that only one process writes into it."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megagent.config import Config, EnvConfig, as_yaml
from megagent.errors import ConfigError, MegagentError
from megagent.observe.files import write_whole
from megagent.paths import expanded

WORLD = "world.json"


def holds_run(root: Path) -> bool:
    """Whether a run was started in this folder: its configuration or metrics are there."""
    return any((root / name).exists() for name in ("config.yaml", "metrics.jsonl"))


def already_holds_run(root: Path) -> str:
    """Why a new run may not start there."""
    return f"trainer.run_dir={root}: already holds a run; continue it with trainer.resume=true, or give another folder"


def _own_keys(env: EnvConfig) -> dict[str, Any]:
    """The environment's name and the keys that it adds to the common ones."""
    common = {item.name for item in fields(EnvConfig)} - {"name"}
    return {item.name: getattr(env, item.name) for item in fields(env) if item.name not in common}


def _other_tasks(root: Path, world: Mapping[str, Any]) -> str | None:
    """Why a run in this folder cannot go on in this world; None if it can, or if none was recorded."""
    path = root / WORLD
    if not path.exists():
        return None
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["digest"] == world["digest"]:
        return None
    changed = [f"env.{name}={value}" for name, value in before["env"].items() if world["env"].get(name) != value]
    fix = f"continue it with {' and '.join(changed)}" if changed else "give it the products that it had"
    return f"trainer.run_dir={root}: the run there had other tasks; {fix}, or give another folder"


class RunFolder:
    """One run's files.

        config.yaml     the resolved configuration
        world.json      which tasks are in which panels: the world's digest, and the environment's own keys
        metrics.jsonl   one line a record
        tensorboard/    the same, as curves
        checkpoints/    what a resume needs
        export/         the trained model as a Hugging Face folder
        exports/        the same of iterations on the way, where trainer.export_freq asks for them
        episodes/       recorded validation episodes, one JSON file line an episode

    Held by one process: an flock on `.lock` lasts until `close` or the end of the process, however that comes.
    """

    def __init__(self, root: Path, lock: IO[str]) -> None:
        self.root = root
        self._lock = lock

    @classmethod
    def create(cls, config: Config, digest: str = "") -> RunFolder:
        """Makes, or with trainer.resume continues, the folder trainer.run_dir; writes config.yaml and world.json there.

        digest: that of the world. Raises ConfigError if the folder already holds a run and trainer.resume is false, or
        the run there had other tasks; MegagentError if another process is running in it or it cannot be written. A
        refused folder is left as it was.
        """
        root = expanded(config.trainer.run_dir)
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = open(root / ".lock", "a+")  # noqa: SIM115 (held as long as the run)
        except OSError as error:
            raise MegagentError(
                f"trainer.run_dir={root}: cannot be written ({error.strerror}). Give a folder that can."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise MegagentError(
                f"trainer.run_dir={root}: {owner} is running in this folder. "
                "Wait until it ends, or give another trainer.run_dir."
            ) from error
        world = {"digest": digest, "env": _own_keys(config.env)}
        taken = holds_run(root) and not config.trainer.resume
        problem = already_holds_run(root) if taken else _other_tasks(root, world)
        if problem:
            lock.close()
            raise ConfigError([problem])
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        folder = cls(root, lock)
        for each in (folder.checkpoints, folder.episodes):
            each.mkdir(exist_ok=True)
        write_whole(root / "config.yaml", as_yaml(config))
        write_whole(root / WORLD, json.dumps(world, indent=2) + "\n")
        return folder

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    def export_of(self, iteration: int) -> Path:
        return self.root / "exports" / f"iteration_{iteration:07d}"

    @property
    def episodes(self) -> Path:
        return self.root / "episodes"

    @property
    def finished_iterations(self) -> int:
        """The iteration of the newest checkpoint, from where a resume goes on; 0 if there is none."""
        latest = self.checkpoints / "latest"
        found = (
            re.fullmatch(r"iteration_(\d+)", latest.read_text(encoding="utf-8").strip()) if latest.exists() else None
        )
        return int(found[1]) if found else 0

    def close(self) -> None:
        """Lets another process use the folder."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
