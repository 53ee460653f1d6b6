"""Conversions that are killed, or find a full disk, at many moments.

    python -m tests.parallel.convert.forked kills|disks|orphans FOLDER EVERY

Each one is a fork of this process, which has everything imported: hundreds of moments in the time of a few commands.
Prints a line for each thing that should not be, and how many moments there were.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megagent.cli import main
from megagent.parallel.convert import conversion, copying, hf_folder  # noqa: F401  before the first fork
from tests.parallel.convert.folders import contents, write_folder

DIRECTIONS = {"hf-to-megatron": ("model", "there"), "megatron-to-hf": ("there", "back")}
EVENTS = ("os.", "shutil.", "fcntl.", "ctypes.")  # of sys.addaudithook: what touches files, folders and locks
_NOT_REACHED = 77
copying.TASK = copying.RUN = 700  # bytes: a few dozen tasks
perform = copying._perform


def start(arguments: list[str], before: Callable[[], None] = lambda: None) -> int:
    """A process that runs `megagent ...` after `before`. Returns its number."""
    process = os.fork()
    if process:
        return process
    status = 99
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        before()
        status = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(process: int) -> int:
    """Its exit status; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def convert(folder: Path, direction: str, out: Path, *options: object) -> list[str]:
    source = folder / DIRECTIONS[direction][0]
    return ["convert", direction, str(source), str(out), "--shard-size", "4000", *map(str, options)]


def slowly(task: copying.Task) -> None:
    time.sleep(0.01)
    perform(task)


def prepare(folder: Path, **changes: int) -> dict[str, dict[str, bytes]]:
    """A model, and what undisturbed conversions make of it."""
    write_folder(folder / "model", "qwen2", files=2, **changes)
    for direction, (_, out) in DIRECTIONS.items():
        assert ended(start(convert(folder, direction, folder / out, "--workers", 1))) == 0
    return {direction: contents(folder / out) for direction, (_, out) in DIRECTIONS.items()}


def check(folder: Path, direction: str, sound: dict[str, bytes], old: dict[str, bytes]) -> Iterator[str]:
    """After a disturbance: the output is the old one or complete; resumed, it is what an undisturbed one is."""
    out = folder / "out"
    now = {name: data for name, data in contents(out).items() if name not in (".journal", ".workers")}
    if now == sound:
        return
    if now != old:
        yield f"{direction}: the output is neither what was there nor complete"
    if ended(start(convert(folder, direction, out, "--resume", "--overwrite", "--workers", 1))) != 0:
        yield f"{direction}: --resume failed"
    elif contents(out) != sound:
        yield f"{direction}: resumed, the output differs"


def fresh(folder: Path, overwrite: bool) -> dict[str, bytes]:
    """Nothing at the output, or an old one, which is returned."""
    for name in ("out", ".out.partial", ".out.old"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if not overwrite:
        return {}
    shutil.copytree(folder / "back", folder / "out")
    (folder / "out" / "extra").write_text("old")
    return contents(folder / "out")


def kills(folder: Path, every: int) -> Iterator[str]:
    """SIGKILL before the n-th thing that is done to the file system, for every n-th n."""
    sounds = prepare(folder)
    moments = 0
    for direction, overwrite in ((direction, overwrite) for direction in DIRECTIONS for overwrite in (False, True)):
        moment = every
        while True:
            old, left = fresh(folder, overwrite), [moment]

            def count(event: str, arguments: tuple[object, ...], left: list[int] = left) -> None:
                if event.startswith(EVENTS) or (event == "open" and str(folder) in str(arguments[0])):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            options = ["--workers", 1, *(["--overwrite"] if overwrite else [])]
            process = start(convert(folder, direction, folder / "out", *options), lambda: sys.addaudithook(count))
            if ended(process) != -signal.SIGKILL:
                break
            moments += 1
            yield from check(folder, direction, sounds[direction], old)
            moment += every
    yield f"{moments} moments"


def disks(folder: Path, every: int) -> Iterator[str]:
    """A file system of its own that is full from the start, before one of its pages is written, or after some tasks."""
    disk = folder / "disk"
    disk.mkdir()
    copying.TASK, copying.RUN = 16384, 8192

    def size(pages: int, *options: str) -> None:
        given = ",".join((*options, f"size={pages * 4096}"))
        subprocess.run(["mount", "-t", "tmpfs", "-o", given, "none", str(disk)], check=True)

    size(4096)
    sounds = prepare(disk, intermediate_size=600)
    moments = 0
    for direction in DIRECTIONS:
        # A negative number: pages that are free at the start; others: tasks that are done when a stranger takes all.
        for moment in [*range(-40, 0, every), *range(0, 6, every)]:
            old = fresh(disk, overwrite=False)
            room = os.statvfs(disk)

            def before(moment: int = moment, used: int = room.f_blocks - room.f_bfree) -> None:
                left = [moment]

                def filling(task: copying.Task) -> None:
                    if left[0] == 0:
                        fill(disk / "stranger")
                    left[0] -= 1
                    perform(task)

                copying._perform = filling
                if moment < 0:
                    size(used - moment, "remount")

            status = ended(start(convert(disk, direction, disk / "out", "--workers", 1), before))
            size(4096, "remount")
            (disk / "stranger").unlink(missing_ok=True)
            if status == 2:
                moments += 1
                yield from check(disk, direction, sounds[direction], old)
            else:
                yield f"{direction}: ended with {status} on a full disk ({moment})"
    yield f"{moments} moments"


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def orphans(folder: Path, every: int) -> Iterator[str]:
    """SIGKILL of the first process while two workers are at it, or of a worker; then another conversion at once."""
    sounds = prepare(folder)
    copying._perform = slowly
    for victim in ("first", "worker"):
        fresh(folder, overwrite=False)
        process = start(convert(folder, "hf-to-megatron", folder / "out", "--workers", 2))
        journal = folder / ".out.partial" / ".journal"
        while not journal.exists() or journal.read_bytes().count(b"\n") < 2:  # until a first task is done
            if os.waitpid(process, os.WNOHANG) != (0, 0):
                yield "the conversion ended before it was killed"
                return
            time.sleep(0.005)
        # In the order of their start; the first one only keeps count of semaphores.
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        os.kill(process if victim == "first" else int(children[-1]), signal.SIGKILL)
        if (status := ended(process)) not in (-signal.SIGKILL, 2):
            yield f"{victim} killed: ended with {status}"
        yield from check(folder, "hf-to-megatron", sounds["hf-to-megatron"], {})
    yield "2 moments"


if __name__ == "__main__":
    torch.set_num_threads(1)
    what = {"kills": kills, "disks": disks, "orphans": orphans}[sys.argv[1]]
    for line in what(Path(sys.argv[2]), int(sys.argv[3])):
        print(line, flush=True)
