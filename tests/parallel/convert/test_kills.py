"""Conversions that are killed, or find a full disk, for real; forked.py does it to many of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[3]
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


def forked(what: str, folder: Path, every: int, under: Sequence[str] = ()) -> list[str]:
    """What went wrong, line by line, and last how many moments there were."""
    command = [*under, sys.executable, "-m", "tests.parallel.convert.forked", what, str(folder), str(every)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_killed_at_any_moment_the_output_is_old_or_complete_and_resume_makes_it_what_it_would_have_been(
    tmp_path: Path,
) -> None:
    *wrong, moments = forked("kills", tmp_path, every=11)
    assert wrong == []
    assert int(moments.split()[0]) > 30


def test_workers_do_not_outlive_the_first_process_and_it_does_not_outlive_them(tmp_path: Path) -> None:
    assert forked("orphans", tmp_path, every=1) == ["2 moments"]


def test_a_disk_that_is_full_at_any_moment_harms_nothing_and_resume_ends_the_work(tmp_path: Path) -> None:
    own = subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True, text=True)
    if own.returncode != 0:
        pytest.skip(f"a file system of one's own cannot be mounted here ({own.stderr.strip()})")
    *wrong, moments = forked("disks", tmp_path, every=5, under=OWN_MOUNTS)
    assert wrong == []
    assert int(moments.split()[0]) >= 16
