"""The convention of benchmarks/: --quick, --json, and a last line that a program can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import close

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = sorted(
    path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if path.stem not in ("__init__", "report")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_takes_quick_and_json(script: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--quick" in answer.stdout
    assert "--json" in answer.stdout


@pytest.mark.parametrize(("bars", "status"), [({"fast": True}, 0), ({"fast": True, "small": False}, 1)])
def test_the_last_line_is_one_object_and_the_status_says_whether_all_bars_hold(
    bars: dict[str, bool], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert close("example", {"seconds": 1.23456}, bars) == status
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"name": "example", "figures": {"seconds": 1.2346}, "bars": bars}
