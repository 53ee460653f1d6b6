"""The folder that a conversion writes: beside its place, under a lock, with a journal, renamed when it is complete."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from megagent.errors import MegagentError

_JOURNAL = ".journal"
_WORKERS = ".workers"  # locked, too, by the processes that do the work
# What a folder has that may be replaced: a model or a checkpoint, and not somebody's home.
_MARKS = ("config.json", "latest_checkpointed_iteration.txt", "metadata.json")
_ORPHANS_END = 180.0  # seconds that processes of a conversion that was killed are given to notice it
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2


class Destination:
    """A context manager. `folder` is where to write; `finish` gives it its name.

    resume: go on with what an interrupted conversion left; overwrite: replace what has the name already.
    Raises MegagentError, on entering, if the name is taken or another process is writing.
    """

    def __init__(self, path: Path, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(os.path.abspath(path))
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        self._old = self.path.with_name(f".{self.path.name}.old")
        self._journal = self.folder / _JOURNAL
        self._resume, self._overwrite = resume, overwrite
        self._lock: int | None = None
        self._worth_keeping = True  # unless it is known that nothing there is of use

    def __enter__(self) -> Destination:
        try:
            self._refuse_existing()
            self._refuse_what_is_beside()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._journal, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise MegagentError(f"{self.folder} cannot be written ({error.strerror}); choose another place") from error
        try:
            self._wait_for_the_lock()
            self._worth_keeping = len(self._lines()) > 1
        except OSError as error:
            self._let_go()
            raise MegagentError(f"{self.folder} cannot be locked ({error.strerror}); choose another place") from error
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            if error is not None and not self._worth_keeping:
                try:
                    self._clear()
                    self._remove_locks(self.folder)
                    self.folder.rmdir()
                except OSError:
                    pass  # what led here is the error to tell; the folder does not look finished
            self._let_go()

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
        lines = self._lines()
        if self._resume and lines and lines[0] == header:
            # A line that a kill or a full disk cut off would run together with the next.
            os.ftruncate(self._lock, sum(len(line) + 1 for line in lines))
            return {int(line) for line in lines[1:] if line.isdigit()}
        self._worth_keeping = False
        self._clear()
        os.ftruncate(self._lock, 0)
        self._note(header)
        return set()

    def done(self, number: int) -> None:
        """Note that a task need not be done again."""
        self._note(str(number))
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
        """Give the folder its name. sync: wait until everything is on the disk before.

        Whenever it is killed, the name is that of the whole new folder or of what was there before.
        """
        self._refuse_existing()
        if sync:
            for path in self.folder.rglob("*"):
                _sync(path)
        self._worth_keeping = True
        if not self.path.exists():
            os.rename(self.folder, self.path)
        elif _exchange(self.folder, self.path):
            os.rename(self.folder, self._old)
        else:  # not on every file system; for a moment, nothing has the name
            os.rename(self.path, self._old)
            os.rename(self.folder, self.path)
        self._remove_locks(self.path)
        shutil.rmtree(self._old, ignore_errors=True)
        if sync:
            _sync(self.path.parent)

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _lines(self) -> list[str]:
        """The whole lines of the journal."""
        written = self._journal.read_bytes()
        return written[: written.rfind(b"\n") + 1].decode("ascii", errors="replace").split("\n")[:-1]

    def _note(self, line: str) -> None:
        assert self._lock is not None
        text = f"{line}\n".encode()
        while text:
            text = text[os.write(self._lock, text) :]

    def _clear(self) -> None:
        """Remove everything but the journal, which says whose folder it is, and the locks."""
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in (_JOURNAL, _WORKERS):
                entry.unlink()

    def _remove_locks(self, folder: Path) -> None:
        (folder / _WORKERS).unlink()
        (folder / _JOURNAL).unlink()

    def _wait_for_the_lock(self) -> None:
        assert self._lock is not None
        taken = MegagentError(f"another process is writing {self.path}; wait for it or choose another place")
        if not _locks(self._lock, fcntl.LOCK_EX):
            raise taken
        if not self._locked_here():
            raise MegagentError(f"another process has just ended writing {self.path}; look at what it did")
        # The one that had the lock was killed, maybe, and its workers may still be at their last tasks.
        deadline = time.monotonic() + _ORPHANS_END
        workers = os.open(self.folder / _WORKERS, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            while not _locks(workers, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise taken
                time.sleep(0.05)
        finally:
            os.close(workers)

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

    def _refuse_what_is_beside(self) -> None:
        """What has the names that are needed beside `path` has to be of a conversion: it is going to be cleared."""
        if self.folder.is_symlink() or (self.folder.exists() and not self._is_ours()):
            raise MegagentError(
                f"{self.folder} is not what an interrupted conversion leaves; move it away or choose another place"
            )
        if os.path.lexists(self._old):
            raise MegagentError(
                f"{self._old} is what an interrupted --overwrite moved out of the way; remove it, or give it its old "
                f"name if {self.path.name} is missing"
            )

    def _is_ours(self) -> bool:
        return self.folder.is_dir() and (self._journal.is_file() or not any(self.folder.iterdir()))


def hold(folder: str) -> None:
    """Until this process ends, nobody begins a conversion into a folder that it writes for another one.

    Raises OSError if somebody does already.
    """
    fcntl.flock(os.open(Path(folder) / _WORKERS, os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)


def _locks(descriptor: int, kind: int) -> bool:
    """Whether the lock is had now. Not by a folder's descriptor: NFS locks only what is opened for writing."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Two folders change names in one moment; False where the system or its file system cannot do that."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here = -100  # AT_FDCWD
    return rename(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0


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
