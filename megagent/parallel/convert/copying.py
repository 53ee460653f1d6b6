"""A plan between files as tasks, and the processes that do them. No torch but where dtypes are cast.

Whatever is contiguous on both sides and keeps its dtype is copied as bytes. The rest is put together in blocks of some
MiB, so that no process ever holds a tensor.
"""

from __future__ import annotations

import errno
import math
import os
import signal
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from threading import Thread
from typing import NamedTuple

import numpy as np

from megagent.errors import MegagentError
from megagent.parallel.convert.destination import hold
from megagent.parallel.convert.stored import Extent, Extents
from megagent.parallel.convert.writing import write_at
from megagent.parallel.reshard.boxes import Region, Shape
from megagent.parallel.reshard.plan import BYTES, Copy, Plan

RUN = 64 << 20  # bytes of a run
BLOCK = 4 << 20  # elements of a block: a process holds it, a piece of it and that piece cast
BUFFER = 1 << 20  # bytes that are read and written at a time
TASK = 128 << 20  # bytes that a process is given at a time
STALLED = 1800.0  # seconds without a finished task after which a conversion gives up
_OPEN_FILES = 64
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Run(NamedTuple):
    """`size` bytes as they are."""

    source: str
    source_offset: int
    target: str
    target_offset: int
    size: int


class Piece(NamedTuple):
    """A part of a tensor in a file, `extent` elements, and where in a block it goes.

    shape: of the whole tensor; start and into may have fixed indices in front of the extent's axes, see Region.
    """

    source: str
    offset: int
    dtype: str
    shape: Shape
    start: Shape
    into: Shape
    extent: Shape


class Block(NamedTuple):
    """Bytes of a target that are put together from pieces; what no piece covers is zero."""

    target: str
    target_offset: int
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


class Task(NamedTuple):
    """What one process does at a time; `size`: bytes that it writes."""

    size: int
    steps: tuple[Run | Block, ...]


def tasks(plan: Plan, source: Extents, target: Extents) -> list[Task]:
    """Everything that a plan copies. Padding is what nothing is written to: the target's files start as zeros."""
    found: list[Task] = []
    steps: list[Run | Block] = []
    filled = 0
    for step, size in _steps(plan, source, target):
        steps.append(step)
        filled += size
        if filled >= TASK:
            found.append(Task(filled, tuple(steps)))
            steps, filled = [], 0
    return [*found, Task(filled, tuple(steps))] if steps else found


def blocks(plan: Plan, source: Extents, target: Extents) -> dict[str, list[Block]]:
    """Every tensor of the plan's target as blocks for `assemble`, in their order."""
    return {
        name: list(_blocks(copies, source, target[rank, name])) for (rank, name), copies in _by_target(plan).items()
    }


def perform(todo: Sequence[tuple[int, Task]], workers: int, done: Callable[[int, int], None], where: str) -> None:
    """Do numbered tasks in this process (workers=1) or several; done(number, bytes) is called here after each.

    Raises MegagentError if the disk is full, a file cannot be read, or a process died; tasks that are done stay done.
    """
    try:
        if workers == 1:
            for number, task in todo:
                _perform(task)
                done(number, task.size)
            return
        with ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (where,)) as pool:
            try:
                _collect(pool, todo, workers, done)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # whoever is told of the error finds nobody writing any more
                raise
    except BrokenProcessPool:
        raise MegagentError(
            f"a process that wrote {where} died (killed, or out of memory?); go on with --resume, maybe fewer --workers"
        ) from None
    except MemoryError:
        raise MegagentError(f"{where}: out of memory; go on with --resume and fewer --workers") from None
    except OSError as error:
        raise failed(where, error) from error


def failed(where: str, error: OSError) -> MegagentError:
    """What an error of the file system means to who converts into `where`."""
    if error.errno in _FULL:
        reason = os.strerror(error.errno or 0)
        return MegagentError(f"{where}: {reason}; make room and go on with --resume, or remove the folder")
    return MegagentError(f"{where}: {error}; put it right and go on with --resume")


@contextmanager
def reading() -> Iterator[None]:
    """Around calls of `assemble`: the files that they open are closed behind the last one."""
    try:
        yield
    finally:
        _files.close()


def assemble(block: Block) -> bytearray:
    """The bytes of a block, from its pieces' files."""
    size = BYTES[block.dtype]
    buffer = bytearray(math.prod(block.shape) * size)
    target = np.frombuffer(buffer, dtype=f"u{size}").reshape(block.shape)
    for piece in block.pieces:
        part = _rows_of(piece)
        if piece.dtype != block.dtype:
            part = _cast(part, piece.dtype, block.dtype)
        target[Region(piece.into, piece.extent).slices] = part
    return buffer


def _rows_of(piece: Piece) -> np.ndarray:
    """The piece as unsigned integers of its width, of shape `extent`."""
    item, extent = BYTES[piece.dtype], Region(piece.start, piece.extent).extent
    # The axis that the piece is cut along: before it there is one index each, after it whole rows are read.
    axis = next((number for number, size in enumerate(extent) if size > 1), len(extent) - 1)
    rest = piece.shape[axis + 1 :]
    first = _position((*piece.start[: axis + 1], *(0 for _ in rest)), piece.shape)
    data = _read(piece.source, piece.offset + first * item, extent[axis] * math.prod(rest) * item)
    rows = np.frombuffer(data, dtype=f"u{item}").reshape(extent[axis], *rest)
    inner = Region(piece.start[axis + 1 :], extent[axis + 1 :]).slices
    return rows[(slice(None), *inner)].reshape(piece.extent)


# --- tasks -----------------------------------------------------------------------------------------------------------


def _by_target(plan: Plan) -> dict[tuple[int, str], list[Copy]]:
    found: dict[tuple[int, str], list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        found[copy.target_rank, copy.target].append(copy)
    return found


def _steps(plan: Plan, source: Extents, target: Extents) -> Iterator[tuple[Run | Block, int]]:
    for key, copies in _by_target(plan).items():
        runs = [run for copy in copies if (run := _run(copy, source, target))]
        if len(runs) < len(copies):
            for block in _blocks(copies, source, target[key]):
                yield block, math.prod(block.shape) * BYTES[block.dtype]
            continue
        for run in runs:
            for low in range(0, run.size, RUN):
                size = min(RUN, run.size - low)
                yield Run(run.source, run.source_offset + low, run.target, run.target_offset + low, size), size


def _run(copy: Copy, source: Extents, target: Extents) -> Run | None:
    """The copy as bytes, None if it is not contiguous or changes the dtype."""
    here, there = source[copy.source_rank, copy.source], target[copy.target_rank, copy.target]
    start, into = Region(copy.source_start, copy.shape), Region(copy.target_start, copy.shape)
    if here.dtype != there.dtype:
        return None
    if not (_contiguous(start.extent, here.shape) and _contiguous(into.extent, there.shape)):
        return None
    item = BYTES[here.dtype]
    return Run(
        here.path,
        here.offset + _position(start.start, here.shape) * item,
        there.path,
        there.offset + _position(into.start, there.shape) * item,
        math.prod(copy.shape) * item,
    )


def _blocks(copies: Sequence[Copy], source: Extents, target: Extent) -> Iterator[Block]:
    """One target tensor, cut along the first axis that has more than one index."""
    shape = target.shape
    axis = next((number for number, size in enumerate(shape) if size > 1), 0)
    row = math.prod(shape[axis + 1 :]) * BYTES[target.dtype]
    # By elements: a tensor is cut alike in every dtype.
    step = max(1, BLOCK // max(math.prod(shape[axis + 1 :]), 1))
    for low in range(0, shape[axis], step):
        high = min(low + step, shape[axis])
        pieces = tuple(piece for copy in copies if (piece := _piece(copy, source, axis, low, high)))
        block_shape = (*shape[:axis], high - low, *shape[axis + 1 :])
        yield Block(target.path, target.offset + low * row, target.dtype, block_shape, pieces)


def _piece(copy: Copy, source: Extents, axis: int, low: int, high: int) -> Piece | None:
    """The part of a copy into the indices low to high of its target's axis, None if there is none."""
    start, into, extent = copy.source_start, copy.target_start, copy.shape
    own = axis - (len(into) - len(extent))  # the same axis of the copy; negative: fixed
    first, last = max(low, into[axis]), min(high, into[axis] + (extent[own] if own >= 0 else 1))
    if first >= last:
        return None
    if own >= 0:
        start = _at(start, axis=own + len(start) - len(extent), move=first - into[axis])
        extent = (*extent[:own], last - first, *extent[own + 1 :])
    into = _at(into, axis, move=first - into[axis] - low)
    held = source[copy.source_rank, copy.source]
    return Piece(held.path, held.offset, held.dtype, held.shape, start, into, extent)


def _at(start: Shape, axis: int, move: int) -> Shape:
    return (*start[:axis], start[axis] + move, *start[axis + 1 :])


def _contiguous(extent: Shape, shape: Shape) -> bool:
    """Whether this many elements along each axis lie in one piece in a tensor of `shape`."""
    for axis in range(len(shape) - 1, -1, -1):
        if extent[axis] != shape[axis]:
            return all(size == 1 for size in extent[:axis])
    return True


def _position(start: Shape, shape: Shape) -> int:
    position = 0
    for index, size in zip(start, shape, strict=True):
        position = position * size + index
    return position


# --- bytes -----------------------------------------------------------------------------------------------------------


class _Files:
    """Open files of this process, the latest used of them."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, int], int] = OrderedDict()

    def get(self, path: str, flags: int) -> int:
        key = (path, flags)
        if key not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[key] = os.open(path, flags | os.O_CLOEXEC)
        self._open.move_to_end(key)
        return self._open[key]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


_files = _Files()
# Through a buffer that stays in a core's cache: where offsets differ by no multiple of a page, as here, that is half as
# fast again as copy_file_range and sendfile; where they do not, it is no slower.
_buffer = memoryview(bytearray(BUFFER))


def _collect(
    pool: ProcessPoolExecutor, todo: Sequence[tuple[int, Task]], workers: int, done: Callable[[int, int], None]
) -> None:
    waiting: dict[Future[None], tuple[int, Task]] = {}
    rest = iter(todo)
    while True:
        # A few more than there are processes, so that none of them waits for this one.
        while len(waiting) < 3 * workers and (item := next(rest, None)) is not None:
            with _without_interrupts():
                waiting[pool.submit(_perform, item[1])] = item
        if not waiting:
            return
        finished, _ = wait(waiting, timeout=STALLED, return_when=FIRST_COMPLETED)
        if not finished:
            raise MegagentError(f"nothing was written for {STALLED:.0f} s; look at the disk and go on with --resume")
        for future in finished:
            number, task = waiting.pop(future)
            future.result()
            done(number, task.size)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started meanwhile never hears Ctrl-C, which in a terminal reaches all: the first process sees to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(where: str) -> None:
    """A worker does not outlive who started it: that one may be killed, and another conversion begin in its place."""
    parent = parent_process()
    assert parent is not None
    try:
        hold(where)
    except OSError:  # the folder is no longer there, or no longer the same conversion's
        os._exit(1)
    # A lock that was had too late, when the next one had begun already, is had by an orphan.
    Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    if wait_for([parent.sentinel], timeout=0):
        os._exit(1)


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)


def _perform(task: Task) -> None:
    try:
        for step in task.steps:
            if isinstance(step, Run):
                _copy(step)
            else:
                write_at(_files.get(step.target, os.O_RDWR), memoryview(assemble(step)), step.target_offset)
    finally:
        _files.close()


def _copy(run: Run) -> None:
    source, target = _files.get(run.source, os.O_RDONLY), _files.get(run.target, os.O_RDWR)
    moved = 0
    while moved < run.size:
        count = os.preadv(source, [_buffer[: run.size - moved]], run.source_offset + moved)
        if count == 0:
            raise _cut(run.source)
        write_at(target, _buffer[:count], run.target_offset + moved)
        moved += count


def _read(path: str, offset: int, size: int) -> bytearray:
    file = _files.get(path, os.O_RDONLY)
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise _cut(path)
        view, offset = view[count:], offset + count
    return data


def _cut(path: str) -> MegagentError:
    return MegagentError(f"{path} became shorter while it was read; take a complete copy of it")


def _cast(part: np.ndarray, source: str, target: str) -> np.ndarray:
    import torch

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    item, wanted = BYTES[source], BYTES[target]
    signed = torch.from_numpy(np.ascontiguousarray(part).view(f"i{item}"))
    wide = signed.view(kinds[source])
    values = wide.to(kinds[target])
    if torch.finfo(kinds[target]).max < torch.finfo(kinds[source]).max and not torch.equal(
        wide.isinf(), values.isinf()
    ):
        raise MegagentError(
            f"there are weights up to {float(wide[wide.isfinite()].abs().max()):.3g}, and {target} ends at "
            f"{torch.finfo(kinds[target]).max:.3g}; choose another --dtype"
        )
    return values.view(integers[wanted]).numpy().view(f"u{wanted}")
