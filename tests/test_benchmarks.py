"""The convention of benchmarks/: --quick, --json, and a last line that a program can read."""

from __future__ import annotations

import json
import os
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


# What a machine that has only torch and megatron-core does not have, of all that this package can use.
ABSENT = (
    "hydra",
    "omegaconf",
    "ray",
    "regex",
    "rich",
    "safetensors",
    "tensordict",
    "tokenizers",
    "transformers",
    "vllm",
)


@pytest.mark.slow
def test_the_gpu_smoke_runs_with_nothing_but_torch_and_megatron(tmp_path: Path) -> None:
    # Every Python process reads sitecustomize when it starts: the benchmark's own child is without them too.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_smoke", "--quick", "--json"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert answer.returncode in (0, 1), answer.stderr
    last = json.loads(answer.stdout.splitlines()[-1])
    assert last["bars"]["small model as on the CPU"], last
    assert last["bars"]["losses and gradients are finite"], last
    assert min(last["figures"]["padded_updates"], last["figures"]["packed_updates"]) >= 2
