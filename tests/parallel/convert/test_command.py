"""megagent convert: what it prints, and the status it ends with."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagent.cli import main
from megagent.parallel.convert import logits
from megagent.parallel.convert.command import _bytes
from megagent.parallel.convert.progress import Progress
from tests.parallel.convert.folders import random_weights, read_folder, same, write_folder


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _keep_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)


def test_there_and_back_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_weights("llama")
    source = write_folder(tmp_path / "model", "llama", weights)
    there, back = tmp_path / "there", tmp_path / "back"
    assert convert("hf-to-megatron", source, there, "--tp", 2, "--pp", 2, "--workers", 1) == 0
    assert f"{there}/release is complete; Megatron-LM: --load {there}" in capsys.readouterr().out
    assert convert("megatron-to-hf", there, back, "--workers", 1, "--shard-size", "2KiB") == 0
    assert same(read_folder(back), weights)
    assert convert("verify", source, there) == 0
    assert "EQUAL: 39 tensors" in capsys.readouterr().out


def test_inspect_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    assert convert("inspect", source, "--digests") == 0
    printed = capsys.readouterr().out
    for line in (
        "kind         Hugging Face",
        "family       qwen2",
        "parameters   2,456",
        "tied         the output layer is the embedding",
        "dtype        BF16 (2,456 parameters)",
        "layout       50 tensors in 1 files",
    ):
        assert line in printed
    assert len([line for line in printed.splitlines() if len(line.partition("  ")[0]) == 64]) == 50


@pytest.mark.parametrize(
    ("dtype", "apart", "status"),
    [("bf16", 1e-6, 0), ("bf16", 1e-4, 1), ("fp32", 1e-2, 0), ("fp32", 0.5, 1), ("fp32", float("nan"), 1)],
)
def test_logits_may_be_apart_as_far_as_the_dtypes_explain(
    dtype: str, apart: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "largest_difference", lambda *_: apart)
    source, there = write_folder(tmp_path / "model", "qwen2"), tmp_path / "there"
    assert convert("hf-to-megatron", source, there, "--workers", 1, "--dtype", dtype) == 0
    assert convert("verify", source, there, "--logits") == status


def test_verify_of_different_weights_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_weights("qwen3")
    one = write_folder(tmp_path / "one", "qwen3", weights)
    weights["model.norm.weight"] += 1
    assert convert("verify", one, write_folder(tmp_path / "other", "qwen3", weights)) == 1
    assert "DIFFERENT: 1 of 47 tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nowhere"), "nowhere: there is no such folder"),
        (("inspect", ".", "--frobnicate"), "--frobnicate: megagent convert has no such option"),
        (("hf-to-megatron", "a", "b", "--shard-size", "much"), "--shard-size=much: give a number of bytes"),
        (("hf-to-megatron", "a", "b"), "a has no config.json"),
        (("megatron-to-hf", "a", "b"), "a: there is no such folder"),
    ],
)
def test_a_slip_is_one_clear_sentence(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert convert(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5 kib", 1536), ("77", 77), ("2b", 2)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert _bytes(text) == size


def test_the_bar_has_bytes_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("model", 4_000_000_000, 1_000_000_000) as progress:
        progress.add(1_000_000_000)
        line = progress.line
    assert line.startswith("model [############            ]  50%  2.0 GB of 4.0 GB  ")
    assert line.endswith(" left")
    assert "/s  " in line
    assert capsys.readouterr().err.count("\n") == 2
