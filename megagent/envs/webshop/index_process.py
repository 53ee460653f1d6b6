"""The index of a catalogue, built by a process of its own: cutting text into terms is half of the work of a build."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from megagent.envs.webshop.arrays import read_arrays, write_arrays
from megagent.envs.webshop.product_arrays import decode
from megagent.envs.webshop.search_build import IndexBuilder
from megagent.errors import InfrastructureError

_WORTH_A_PROCESS = 1 << 24  # bytes of records; what is less is indexed before a process has started
_PACKET = 1 << 20  # bytes of records sent at a time
_DONE = b"done"
_LONGEST_FINISH = 3600.0  # seconds that the end of an index may take
_PATIENCE = 60.0  # seconds for the process to go, once it has been told to


class IndexProcess:
    """An IndexBuilder that takes records, in another process if there are many of them and a scratch folder."""

    def __init__(self, scratch: Path | None) -> None:
        self._scratch = scratch
        self._waiting: list[bytes] = []
        self._size = 0  # bytes waiting
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def add_record(self, record: bytes) -> None:
        """Takes the record of the next product. Raises InfrastructureError if the process has ended."""
        self._waiting.append(record)
        self._size += len(record)
        if self._size >= (_PACKET if self._process else _WORTH_A_PROCESS) and self._scratch:
            self._send(self._scratch)

    def finish(self) -> dict[str, np.ndarray]:
        """The arrays of the index. Raises InfrastructureError if the process has ended."""
        if self._process is None or self._scratch is None:
            return _build(self._waiting, None)
        self._send(self._scratch)
        self._send(self._scratch)  # nothing: the end
        if not self._finished():
            raise self._ended()
        return read_arrays(self._scratch / "index")[0]

    def close(self) -> None:
        """Ends the process."""
        if self._connection:
            self._connection.close()
        if self._process:
            self._process.terminate()
            self._process.join(_PATIENCE)
            self._process = None

    def _send(self, scratch: Path) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")  # the caller may have threads
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, scratch), name="index", daemon=True)
            self._process.start()
            theirs.close()
        assert self._connection
        lengths = np.array([len(record) for record in self._waiting], np.uint32)
        try:
            self._connection.send_bytes(lengths.tobytes())
            self._connection.send_bytes(b"".join(self._waiting))
        except OSError:
            raise self._ended() from None
        self._waiting, self._size = [], 0

    def _finished(self) -> bool:
        assert self._connection
        try:
            return self._connection.poll(_LONGEST_FINISH) and self._connection.recv_bytes() == _DONE
        except (EOFError, OSError):
            return False

    def _ended(self) -> InfrastructureError:
        return InfrastructureError(
            "the process of the search index has ended early; make room in memory and on disk, and build again"
        )


def _build(records: Iterable[bytes], scratch: Path | None) -> dict[str, np.ndarray]:
    builder = IndexBuilder(scratch)
    for record in records:
        builder.add(decode(record))
    return builder.finish()


def _serve(connection: Connection, scratch: Path) -> None:
    """What the process does: it builds an index of the records it is sent, and leaves it in `scratch`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the one that builds ends this one
    try:
        arrays = _build(_received(connection), scratch)
    except EOFError:  # the other is gone
        return
    with (scratch / "index").open("wb") as file:
        write_arrays(file, arrays, {})
    connection.send_bytes(_DONE)


def _received(connection: Connection) -> Iterator[bytes]:
    while lengths := np.frombuffer(connection.recv_bytes(), np.uint32).tolist():
        packet = connection.recv_bytes()
        start = 0
        for length in lengths:
            yield packet[start : start + length]
            start += length
