"""The shop's part of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megagent.cli import main
from tests.shop.recordings import SHOPPED, write

REPOSITORY = Path(__file__).parents[2]


def test_without_a_verb_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shop"]) == 0
    printed = capsys.readouterr().out
    for verb in ("build", "play", "serve", "replay"):
        assert f"\n    {verb} " in printed


@pytest.mark.parametrize("verb", ["build", "play", "serve", "replay"])
def test_every_verb_has_a_help_text(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shop", verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: megagent shop {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["play", "env.compat=none"], "env.compat=none: megagent shop takes no overrides"),
        (["play", "--nonsense"], "--nonsense: there is no such option"),
        (["play", "--task", "100000"], "task 100000: the train panel has tasks 0 to"),
        (["play", "--catalog", "no/such"], "no/such: there is no such folder or file"),
        (["serve", "--port", "99999"], "--port 99999: must be 0 (any free port) to 65535"),
        (["replay", "no/such.jsonl"], "no/such.jsonl: No such file or directory"),
        (["replay", "no/such.jsonl", "--web"], "no/such.jsonl: No such file or directory"),
    ],
)
def test_a_slip_is_a_message_with_status_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shop", *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert "Traceback" not in printed.err


def test_a_recorded_episode_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shop", "replay", str(write(tmp_path / "e.jsonl", SHOPPED)), "--episode", "1"]) == 0
    assert "Step 3 of 3" in capsys.readouterr().out


def test_shopping_needs_nothing_heavy() -> None:
    heavy = {"torch", "ray", "vllm", "megatron", "transformers", "tensordict"}
    code = (
        "import sys; from megagent.cli import main; main(['shop', 'play', '--task', '0']);"
        f"import megagent.shop.serve; print(sorted({heavy} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input="shirt\n", cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_under_the_output_is_one_sentence() -> None:
    command = f"{sys.executable} -m megagent shop play </dev/null >/dev/full"
    ended = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=150)
    told = "megagent: the output cannot be written (No space left on device); make room for it\n"
    assert (ended.returncode, ended.stderr) == (2, told)
