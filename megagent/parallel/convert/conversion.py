"""The two conversions, and opening a checkpoint of either kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megagent.errors import MegagentError
from megagent.parallel.convert import copying, hf_folder, megatron_folder
from megagent.parallel.convert.destination import Destination
from megagent.parallel.convert.progress import Progress
from megagent.parallel.convert.stored import DTYPES, Extents, Stored
from megagent.parallel.degrees import Degrees
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import make_plan

SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Options:
    """How to convert. dtype: of DTYPES, None to keep each tensor's; workers: processes; shard_bytes: of one file."""

    dtype: str | None = None
    workers: int = 1
    resume: bool = False
    overwrite: bool = False
    sync: bool = False
    quiet: bool = False
    shard_bytes: int = SHARD_BYTES


def open_any(path: Path, model: Path | None = None) -> Stored:
    """A checkpoint of either kind. model: the Hugging Face folder of a Megatron checkpoint that does not hold its own.

    Raises MegagentError that lists everything that is wrong with it.
    """
    if not path.is_dir():
        raise MegagentError(f"{path}: there is no such folder; give a Hugging Face folder or a Megatron checkpoint")
    resolved = megatron_folder.resolve(path)
    if megatron_folder.is_megatron(resolved):
        return megatron_folder.open_checkpoint(resolved, model)
    return hf_folder.open_folder(path)


def to_megatron(source: Path, out: Path, degrees: Degrees, options: Options) -> Path:
    """A Hugging Face folder as a distributed checkpoint that any tp, pp and ep can load. Returns its folder in `out`.

    degrees: those it is meant for, which are checked, and whose tp the vocabulary is padded for.
    """
    stored = hf_folder.open_folder(source)
    stored.architecture.require(degrees)

    def lay_out(folder: Path) -> tuple[Layout, Extents, int]:
        inner = folder / megatron_folder.RELEASE
        inner.mkdir(exist_ok=True)
        (folder / megatron_folder.TRACKER).write_text(f"{megatron_folder.RELEASE}\n", encoding="utf-8")
        laid = megatron_folder.lay_out(
            inner, stored.architecture, _dtypes(stored, options.dtype), degrees.tp, options.shard_bytes
        )
        (inner / megatron_folder.COMPANIONS).mkdir(exist_ok=True)
        hf_folder.copy_companions(stored.companions, inner / megatron_folder.COMPANIONS, options.dtype)
        return laid

    padded = stored.architecture.padded_vocab(degrees.tp)
    _convert(stored, out, lay_out, options, padded)
    return out / megatron_folder.RELEASE


def to_hf(source: Path, out: Path, model: Path | None, options: Options) -> Path:
    """A distributed checkpoint (of Megatron-LM, a conversion or a training run) as a Hugging Face folder."""
    stored = open_any(source, model)
    if stored.kind != "Megatron":
        raise MegagentError(f"{source} is a {stored.kind} folder; give a Megatron checkpoint")

    def lay_out(folder: Path) -> tuple[Layout, Extents, int]:
        shapes = stored.architecture.hf_shapes()
        laid = hf_folder.lay_out(folder, shapes, _dtypes(stored, options.dtype), options.shard_bytes)
        hf_folder.copy_companions(stored.companions, folder, _common_dtype(stored, options.dtype))
        return laid

    _convert(stored, out, lay_out, options)
    return out


def _convert(
    stored: Stored,
    out: Path,
    lay_out: Callable[[Path], tuple[Layout, Extents, int]],
    options: Options,
    padded_vocab: int = 0,
) -> None:
    """Plan, check, copy, rename: nothing has the name `out` before everything is in it.

    padded_vocab: rows of the vocabulary in what is written, if it is padded.
    """
    if options.workers < 1:
        raise MegagentError(f"--workers={options.workers}: at least one process has to do the work")
    _refuse_entangled(out, stored)
    with Destination(out, options.resume, options.overwrite) as destination:
        try:
            identity = list(_identity(stored, options))
            finished = destination.begin((padded_vocab, *identity))
            before = _sizes(destination.folder)
            layout, extents, size = lay_out(destination.folder)
        except OSError as error:
            raise copying.failed(str(destination.folder), error) from error
        destination.require_space(size)
        plan = make_plan(stored.layout, layout, cast=True)
        plan.check()
        work = copying.tasks(plan, stored.extents, extents)
        # Who has removed files to make room has removed what tasks have done.
        whole = {path for path, length in _sizes(destination.folder).items() if before.get(path) == length}
        todo = [
            (number, task)
            for number, task in enumerate(work)
            if number not in finished or not all(step.target in whole for step in task.steps)
        ]
        total = sum(task.size for task in work)
        already = total - sum(task.size for _, task in todo)
        with Progress(f"{out.name}", total, already, options.quiet) as progress:

            def done(number: int, count: int) -> None:
                destination.done(number)
                progress.add(count)

            copying.perform(todo, min(options.workers, len(todo) or 1), done, str(destination.folder))
        try:
            if list(_identity(stored, options)) != identity:
                raise MegagentError(f"{stored.folder} was changed while it was read; start again when it is complete")
            destination.finish(options.sync)
        except OSError as error:
            raise copying.failed(str(destination.folder), error) from error


def _refuse_entangled(out: Path, stored: Stored) -> None:
    """Where the output would touch what it is made of, by whatever name or link."""
    real = Path(os.path.realpath(out))
    files = {Path(os.path.realpath(extent.path)) for extent in stored.extents.values()}
    folders = {Path(os.path.realpath(folder)) for folder in (stored.folder, stored.companions)}
    if any(real == path or real in path.parents for path in folders | files):
        raise MegagentError(f"{out} is, or holds, what is converted; choose another folder")
    if any(folder in real.parents for folder in folders):
        raise MegagentError(f"{out} is inside of what is converted; choose a folder beside it")


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _identity(stored: Stored, options: Options) -> Iterable[object]:
    """What the numbers of tasks follow from: the source's files as they are now, and the options that shape them."""
    yield options.dtype, options.shard_bytes, stored.kind
    for path in sorted({extent.path for extent in stored.extents.values()}):
        status = os.stat(path)
        yield path, status.st_size, status.st_mtime_ns
    yield from sorted(stored.extents.items())


def _dtypes(stored: Stored, wanted: str | None) -> dict[str, str]:
    """Hugging Face name -> dtype of what is written."""
    return stored.dtypes if wanted is None else dict.fromkeys(stored.dtypes, DTYPES[wanted][0])


def _common_dtype(stored: Stored, wanted: str | None) -> str | None:
    """The dtype that config.json should speak of, None to leave what it says."""
    if wanted is not None:
        return wanted
    held = set(stored.dtypes.values())
    return next((name for name, (short, _) in DTYPES.items() if {short} == held), None)
