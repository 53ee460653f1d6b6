"""Bytes into files, on a disk that may be full."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def write_sparse(path: Path, parts: Sequence[tuple[int, bytes]], size: int) -> None:
    """A file of `size` bytes with these at their offsets, zeros elsewhere. One that is there keeps its other bytes."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, size)
        for offset, data in parts:
            write_at(descriptor, data, offset)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """All of the data: a disk that fills up takes a part of it first, and says no to the rest."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count
