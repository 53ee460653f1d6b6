"""What lies at the output of a conversion and beside it, and what a full disk leaves: nothing is harmed."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megagent.errors import MegagentError
from megagent.parallel.convert import conversion, copying, destination, writing
from megagent.parallel.convert.conversion import Options
from megagent.parallel.degrees import Degrees
from tests.parallel.convert.folders import QUIET, contents, read_folder, same, write_folder

RESUME = Options(quiet=True, resume=True)
OVERWRITE = Options(quiet=True, overwrite=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", "qwen2", files=2)


def convert(model: Path, out: Path, options: Options = QUIET) -> None:
    conversion.to_megatron(model, out, Degrees(), options)


def stop_after(monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    """Ctrl-C after so many tasks of a few bytes."""
    perform, done = copying._perform, [0]

    def limited(task: copying.Task) -> None:
        if done[0] == tasks:
            raise KeyboardInterrupt
        perform(task)
        done[0] += 1

    monkeypatch.setattr(copying, "TASK", 1)
    monkeypatch.setattr(copying, "_perform", limited)


# --- beside the output -----------------------------------------------------------------------------------------------


def test_a_folder_that_only_looks_like_an_unfinished_conversion_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".there.partial").mkdir()
    (tmp_path / ".there.partial" / "thesis.tex").touch()
    for options in (QUIET, RESUME, OVERWRITE):
        with pytest.raises(MegagentError, match="is not what an interrupted conversion leaves"):
            convert(model, tmp_path / "there", options)
    assert [path.name for path in (tmp_path / ".there.partial").iterdir()] == ["thesis.tex"]


def test_a_link_in_place_of_the_unfinished_folder_is_not_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".journal").touch()
    (tmp_path / ".there.partial").symlink_to(tmp_path / "home")
    with pytest.raises(MegagentError, match="is not what an interrupted conversion leaves"):
        convert(model, tmp_path / "there")
    assert (tmp_path / "home" / ".journal").exists()


def test_links_in_an_unfinished_folder_are_removed_and_not_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    (tmp_path / ".there.partial").mkdir()
    (tmp_path / ".there.partial" / ".journal").touch()
    (tmp_path / ".there.partial" / "hf").symlink_to(tmp_path / "home")
    convert(model, tmp_path / "there")
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_what_an_overwrite_moved_away_is_not_removed_by_the_next(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".there.old").mkdir()
    (tmp_path / ".there.old" / "config.json").touch()
    with pytest.raises(MegagentError, match="moved out of the way; remove it"):
        convert(model, tmp_path / "there")
    assert (tmp_path / ".there.old" / "config.json").exists()


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite_replaces_all_of_the_old_output_and_leaves_nothing_beside(
    exchange: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(destination, "_exchange", lambda *_: False)
    convert(model, tmp_path / "there")
    sound = contents(tmp_path / "there")
    (tmp_path / "there" / "extra").touch()
    convert(model, tmp_path / "there", OVERWRITE)
    assert contents(tmp_path / "there") == sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "there"]


def test_an_output_that_appears_meanwhile_is_not_replaced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "perform", lambda *_: write_folder(tmp_path / "there", "llama"))
    with pytest.raises(MegagentError, match="there exists already"):
        convert(model, tmp_path / "there")
    assert "Llama" in (tmp_path / "there" / "config.json").read_text()


def test_a_worker_of_a_conversion_that_was_killed_is_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "_ORPHANS_END", 0.0)
    (tmp_path / ".there.partial").mkdir()
    (tmp_path / ".there.partial" / ".journal").touch()
    with open(tmp_path / ".there.partial" / ".workers", "w") as workers:
        fcntl.flock(workers, fcntl.LOCK_SH)
        with pytest.raises(MegagentError, match="another process is writing"):
            convert(model, tmp_path / "there")
    convert(model, tmp_path / "there")


# --- input and output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["model", "model/", ".", "linked", "linked/../model"])
def test_an_output_that_is_or_holds_the_input_is_refused_by_any_name(out: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(model)
    before = contents(model)
    with pytest.raises(MegagentError, match="is, or holds, what is converted"):
        convert(model, Path(f"{tmp_path}/{out}"), OVERWRITE)
    assert contents(model) == before


@pytest.mark.parametrize("out", ["model/new", "linked/new", "model/new/er"])
def test_an_output_inside_of_the_input_is_refused(out: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(model)
    before = contents(model)
    with pytest.raises(MegagentError, match="is inside of what is converted"):
        convert(model, tmp_path / out)
    assert contents(model) == before


def test_the_model_whose_config_is_taken_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "there")
    shutil.rmtree(tmp_path / "there" / "release" / "hf")
    with pytest.raises(MegagentError, match="is, or holds, what is converted"):
        conversion.to_hf(tmp_path / "there", model, model, OVERWRITE)
    assert (model / "config.json").exists()


def test_a_folder_of_links_is_converted_and_what_they_lead_to_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for path in model.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    with pytest.raises(MegagentError, match="is, or holds, what is converted"):
        convert(tmp_path / "snapshot", model, OVERWRITE)
    convert(tmp_path / "snapshot", tmp_path / "there")
    back = conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)
    assert same(read_folder(back), read_folder(model))
    assert not any(path.is_symlink() for path in back.iterdir())


def test_an_input_that_changes_meanwhile_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = copying.perform

    def changing(*arguments: object) -> None:
        perform(*arguments)  # type: ignore[arg-type]
        os.utime(model / "model-00001-of-00002.safetensors", ns=(1, 1))

    monkeypatch.setattr(copying, "perform", changing)
    with pytest.raises(MegagentError, match="model was changed while it was read"):
        convert(model, tmp_path / "there")
    assert not (tmp_path / "there").exists()


# --- what is left for resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_files_that_were_removed_to_make_room_are_written_again(
    harm: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model, tmp_path / "sound")
    with monkeypatch.context() as patch:
        stop_after(patch, 30)
        with pytest.raises(KeyboardInterrupt):
            convert(model, tmp_path / "there")
    written = tmp_path / ".there.partial" / "release" / "__0_0.distcp"
    written.unlink() if harm == "removed" else os.truncate(written, 100)
    monkeypatch.setattr(copying, "TASK", 1)
    convert(model, tmp_path / "there", RESUME)
    assert contents(tmp_path / "there") == contents(tmp_path / "sound")


def test_an_error_before_the_work_begins_does_not_lose_what_is_done(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            convert(model, tmp_path / "there")
    journal = (tmp_path / ".there.partial" / ".journal").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_identity", lambda *_: iter([1 / 0]))
        with pytest.raises(ZeroDivisionError):
            convert(model, tmp_path / "there", RESUME)
    assert (tmp_path / ".there.partial" / ".journal").read_text() == journal


# --- full disks ------------------------------------------------------------------------------------------------------


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes: what a quota says, for real."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("direction", ["to Megatron", "to Hugging Face"])
def test_wherever_files_cannot_grow_further_it_is_one_error_and_resume_ends_the_work(
    direction: str, model: Path, tmp_path: Path
) -> None:
    def run(out: Path, options: Options) -> None:
        if direction == "to Megatron":
            convert(model, out, options)
        else:
            conversion.to_hf(tmp_path / "source", out, None, options)

    convert(model, tmp_path / "source")
    run(tmp_path / "sound", QUIET)
    sound = contents(tmp_path / "sound")
    largest = max(map(len, sound.values()))
    out = tmp_path / "out"
    for size in [*range(0, 200, 20), *range(200, largest, largest // 20)]:
        with files_up_to(size), pytest.raises(MegagentError, match="File too large"):
            run(out, QUIET)
        assert not out.exists()
        run(out, RESUME)
        assert contents(out) == sound
        shutil.rmtree(out)


def test_a_disk_that_takes_a_part_of_what_is_written_is_given_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, bytes(data)[:3], offset))
    writing.write_sparse(tmp_path / "file", [(2, b"head"), (10, b"the tail")], 20)
    assert (tmp_path / "file").read_bytes() == b"\0\0head\0\0\0\0the tail\0\0"


def test_a_full_disk_behind_standard_error_does_not_stop_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def isatty(self) -> bool:
            return False

        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stderr", Full())
    convert(model, tmp_path / "there", Options())
    assert (tmp_path / "there").exists()
