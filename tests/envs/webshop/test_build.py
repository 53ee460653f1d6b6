from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagent.envs.webshop import build
from megagent.envs.webshop.build import Progress, build_catalog, check_out
from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.nouns import RuleTagger
from megagent.errors import CatalogError

from .conftest import entry, item

PATIENCE = 120  # seconds


@pytest.fixture
def folder(tmp_path):
    """A source of 600 products, of which two have faults."""
    source = tmp_path / "source"
    source.mkdir()
    items = [item(f"B{number}") for number in range(598)] + [item("B598", name=5), item("B599", pricing="free")]
    (source / "items_shuffle.json").write_text(json.dumps(items))
    (source / "items_ins_v2.json").write_text(json.dumps({element["asin"]: entry() for element in items}))
    return source


def test_a_catalogue_is_built_with_what_it_was_made_of(tmp_path):
    built = build_catalog("embedded", tmp_path / "x.shop", tagger=RuleTagger())
    found = Catalog.open(tmp_path / "x.shop")
    assert (built.products, built.dropped, built.faults, built.notes) == (60, 0, "", "")
    assert built.size == (tmp_path / "x.shop").stat().st_size
    assert built.digest == found.digest == found.meta["digest"]
    assert built.noun_source == found.noun_source
    assert found.meta["source"] == "embedded"
    assert os.listdir(tmp_path) == ["x.shop"]


def test_a_fault_stops_the_build_and_leaves_the_old_catalogue(tmp_path, folder):
    out = tmp_path / "x.shop"
    build_catalog("embedded", out)
    before = out.read_bytes()
    with pytest.raises(CatalogError, match=r"2 faults\n  product 598 \(B598\): name is 5.*\n  product 599 \(B599\)"):
        build_catalog(folder, out, overwrite=True)
    assert out.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["source", "x.shop"]


def test_skipped_products_are_counted_and_named(tmp_path, folder):
    built = build_catalog(folder, tmp_path / "x.shop", skip_bad=True)
    assert (built.products, built.dropped) == (598, 2)
    assert "product 598 (B598): name is 5" in built.faults
    assert Catalog.open(tmp_path / "x.shop").meta["dropped"] == 2


def test_progress_is_told_stage_by_stage(tmp_path, folder):
    told: list[Progress] = []
    build_catalog(folder, tmp_path / "x.shop", skip_bad=True, on_progress=told.append)
    assert [progress.stage for progress in told] == ["reading", "reading", "reading", "indexing", "writing"]
    assert [progress.products for progress in told] == [256, 512, 600, 600, 598]
    assert all(0 < progress.read <= progress.size for progress in told)


def test_a_catalogue_that_is_there_is_replaced_only_when_asked(tmp_path):
    out = tmp_path / "x.shop"
    build_catalog("embedded", out)
    with pytest.raises(CatalogError, match="x.shop: exists; replace it with --overwrite"):
        build_catalog("embedded", out)
    build_catalog("embedded", out, overwrite=True)


def test_a_file_that_is_no_catalogue_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CatalogError, match="thesis.tex: exists and is not a built catalogue"):
        build_catalog("embedded", tmp_path / "thesis.tex", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_output_that_cannot_be_is_refused_before_the_source_is_opened(tmp_path):
    with pytest.raises(CatalogError, match="the folder .*nowhere does not exist; create it first"):
        build_catalog(tmp_path / "no source", tmp_path / "nowhere" / "x.shop")
    with pytest.raises(CatalogError, match="is a folder; give the name of a file, such as .*catalog.shop"):
        check_out(tmp_path, overwrite=True)


def test_a_name_that_no_file_can_have_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(CatalogError, match="the name has more than 200 bytes; choose a shorter one"):
        build_catalog("embedded", tmp_path / ("x" * 300))
    with pytest.raises(CatalogError, match="xxx: no such folder"):
        build_catalog(tmp_path / ("x" * 300), tmp_path / "x.shop")
    with pytest.raises(CatalogError, match="xxx: no such folder"):
        Catalog.load(tmp_path / ("x" * 300))
    with pytest.raises(CatalogError, match="nobody-at-all/x: no such folder"):
        Catalog.load("~nobody-at-all/x")


def test_a_file_that_has_come_while_a_catalogue_was_built_is_not_replaced(tmp_path):
    def other(progress: Progress) -> None:
        (tmp_path / "x.shop").write_text("years of work")

    with pytest.raises(CatalogError, match="x.shop: exists and is not a built catalogue"):
        build_catalog("embedded", tmp_path / "x.shop", on_progress=other)
    assert (tmp_path / "x.shop").read_text() == "years of work"
    assert os.listdir(tmp_path) == ["x.shop"]


def test_a_link_is_followed_and_not_replaced(tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "x.shop").symlink_to(tmp_path / "large disk" / "y.shop")
    build_catalog("embedded", tmp_path / "x.shop")
    assert (tmp_path / "x.shop").is_symlink()
    assert len(Catalog.open(tmp_path / "large disk" / "y.shop")) == 60


def test_a_missing_source_is_named_and_nothing_is_left(tmp_path):
    with pytest.raises(CatalogError, match="no source: no such folder"):
        build_catalog(tmp_path / "no source", tmp_path / "x.shop")
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_the_old_catalogue_and_no_scratch(tmp_path, folder):
    def interrupt(progress: Progress) -> None:
        if progress.stage == "writing":
            raise KeyboardInterrupt

    out = tmp_path / "x.shop"
    build_catalog("embedded", out)
    before = out.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        build_catalog(folder, out, skip_bad=True, overwrite=True, on_progress=interrupt)
    assert out.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["source", "x.shop"]


def test_a_full_disk_is_told_in_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build, "write_arrays", full)
    with pytest.raises(CatalogError, match=r"x.shop: cannot be written \(No space left on device\); make room in"):
        build_catalog("embedded", tmp_path / "x.shop")
    assert os.listdir(tmp_path) == []


def test_scratch_of_a_dead_build_is_removed_and_that_of_a_living_one_kept(tmp_path):
    dead, living, young = (tmp_path / f".x.shop.build-{name}" for name in ("dead", "living", "young"))
    for left in (dead, living, young):
        left.mkdir()
    (dead / "lock").touch()
    (dead / "products.records").touch()
    with build._lock(living / "lock"):
        build_catalog("embedded", tmp_path / "x.shop")
    assert sorted(os.listdir(tmp_path)) == [living.name, young.name, "x.shop"]


@pytest.mark.slow
def test_a_killed_build_leaves_the_old_catalogue_and_the_next_one_succeeds(tmp_path):
    """Killed while the index is built by a process of its own, which must not outlive it."""
    out = tmp_path / "x.shop"
    build_catalog("embedded", out)
    before = out.read_bytes()
    script = f"""
import os, time
from pathlib import Path
from megagent.envs.webshop import build, index_process
index_process._WORTH_A_PROCESS = index_process._PACKET = 1
def stay(progress):
    if progress.stage == "indexing":
        print("here", flush=True)
        time.sleep({PATIENCE})
build.build_catalog("embedded", Path({str(out)!r}), overwrite=True, on_progress=stay)
"""
    (tmp_path / "script.py").write_text(
        f'if __name__ == "__main__":\n{"".join(f"    {x}" for x in script.splitlines(True))}'
    )
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "here\n"
        (scratch,) = tmp_path.glob(".x.shop.build-*")
        children = members(process.pid)
        assert len(children) > 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    assert out.read_bytes() == before
    assert scratch.exists()
    deadline = time.monotonic() + PATIENCE
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members(process.pid) == []
    build_catalog("embedded", out, overwrite=True)
    assert out.read_bytes() == before
    assert not scratch.exists()


def members(session: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if not path.name.isdigit() or os.getsid(int(path.name)) != session:
                continue
            if (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(path.name))
        except OSError:  # it has just ended
            continue
    return found
