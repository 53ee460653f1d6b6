"""The folder that a conversion writes: beside its place, under a lock, with a journal, renamed when it is complete."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from megagent.errors import MegagentError

_JOURNAL = ".journal"
# What a folder has that may be replaced: a model or a checkpoint, and not somebody's home.
_MARKS = ("config.json", "latest_checkpointed_iteration.txt", "metadata.json")


class Destination:
    """A context manager. `folder` is where to write; `finish` gives it its name.

    resume: go on with what an interrupted conversion left; overwrite: replace what has the name already.
    Raises MegagentError, on entering, if the name is taken or another process is writing.
    """

    def __init__(self, path: Path, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(os.path.abspath(path))
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        self._journal = self.folder / _JOURNAL
        self._resume, self._overwrite = resume, overwrite
        self._lock: int | None = None
        self._worth_keeping = False  # whether a task is done

    def __enter__(self) -> Destination:
        self._refuse_existing()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._journal, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise MegagentError(f"{self.folder} cannot be written ({error.strerror}); choose another place") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise MegagentError(
                f"another process is writing {self.path}; wait for it or choose another place"
            ) from None
        if not self._locked_here():
            os.close(self._lock)
            self._lock = None
            raise MegagentError(f"another process has just ended writing {self.path}; look at what it did")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            if error is not None and not self._worth_keeping:
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def begin(self, work: Iterable[object]) -> set[int]:
        """The numbers of the tasks that need not be done again; `work` says what there is to do.

        Without resume, or if other work was begun here, or before the machine was started last (what was written then
        may never have reached the disk), everything is done anew.
        """
        assert self._lock is not None
        digest = hashlib.sha256()
        for item in work:
            digest.update(repr(item).encode())
        header = f"{digest.hexdigest()} {_boot()}"
        written = self._journal.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]  # without a line that a kill cut off
        lines = whole.decode("ascii", errors="replace").splitlines()
        if self._resume and lines and lines[0] == header:
            os.ftruncate(self._lock, len(whole))
            self._worth_keeping = len(lines) > 1
            return {int(line) for line in lines[1:] if line.isdigit()}
        for entry in self.folder.iterdir():
            if entry.name != _JOURNAL:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{header}\n".encode())
        return set()

    def done(self, number: int) -> None:
        """Note that a task need not be done again."""
        assert self._lock is not None
        os.write(self._lock, f"{number}\n".encode())
        self._worth_keeping = True

    def require_space(self, size: int) -> None:
        """Raises MegagentError if the disk has less room than `size` bytes, apart from what is written already."""
        usage = shutil.disk_usage(self.folder)
        there = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())
        if size > usage.free + there:
            raise MegagentError(
                f"{self.path} needs {size / 1e9:.1f} GB and its disk has {usage.free / 1e9:.1f} GB left; make room or "
                "choose another place"
            )

    def finish(self, sync: bool) -> None:
        """Give the folder its name. sync: wait until everything is on the disk before."""
        if sync:
            for path in self.folder.rglob("*"):
                _sync(path)
        self._journal.unlink()
        old = self.path.with_name(f".{self.path.name}.old")
        if self.path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.path, old)
        os.rename(self.folder, self.path)
        shutil.rmtree(old, ignore_errors=True)
        if sync:
            _sync(self.path.parent)

    def _locked_here(self) -> bool:
        """Whether the lock is that of the folder, and not of one that was renamed or removed meanwhile."""
        assert self._lock is not None
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self._journal))
        except FileNotFoundError:
            return False

    def _refuse_existing(self) -> None:
        if self.path.is_symlink():
            raise MegagentError(f"{self.path} is a link; give the folder that it leads to, or another one")
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self._overwrite:
            raise MegagentError(f"{self.path} exists already; choose another folder, or replace it with --overwrite")
        if not any((self.path / mark).exists() for mark in _MARKS):
            raise MegagentError(f"{self.path} is no checkpoint, so it is not overwritten; choose another folder")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
