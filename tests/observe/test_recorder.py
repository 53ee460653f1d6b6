from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from megagent.config import Config
from megagent.observe.recorder import Recorder, read_metrics
from megagent.observe.run_folder import RunFolder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.trainer.run_dir, config.trainer.iterations = str(tmp_path), 3
    config.logger.tensorboard = False
    return config


@pytest.fixture
def folder(config: Config) -> Iterator[RunFolder]:
    with RunFolder.create(config) as folder:
        yield folder


def test_a_record_is_on_disk_before_the_next_one(folder: RunFolder, config: Config) -> None:
    with Recorder(folder, config) as recorder:
        recorder.record(1, {"actor/pg_loss": 0.5})
        record = json.loads(folder.metrics.read_text())
    assert (record["step"], record["actor/pg_loss"]) == (1, 0.5)


def checkpoint_of(folder: RunFolder, iteration: int) -> None:
    (folder.checkpoints / "latest").write_text(f"iteration_{iteration:07d}\n")


def test_a_resumed_run_appends_after_its_checkpoint(folder: RunFolder, config: Config) -> None:
    for step in (1, 2):
        with Recorder(folder, config) as recorder:
            recorder.record(step, {})
        checkpoint_of(folder, step)
    assert [record["step"] for record in read_metrics(folder.metrics)] == [1, 2]


def test_records_of_iterations_that_are_done_again_are_dropped(folder: RunFolder, config: Config) -> None:
    with Recorder(folder, config) as recorder:
        for step in range(6):
            recorder.record(step, {})
    checkpoint_of(folder, 3)
    with Recorder(folder, config) as recorder:
        recorder.record(4, {})
    assert [record["step"] for record in read_metrics(folder.metrics)] == [0, 1, 2, 3, 4]


def test_without_a_checkpoint_a_resumed_run_begins_its_records_anew(folder: RunFolder, config: Config) -> None:
    with Recorder(folder, config) as recorder:
        recorder.record(0, {})
    with Recorder(folder, config) as recorder:
        recorder.record(0, {})
    assert [record["step"] for record in read_metrics(folder.metrics)] == [0]


def test_a_line_torn_by_a_crash_does_not_swallow_the_next_one(folder: RunFolder, config: Config) -> None:
    folder.metrics.write_text('{"step": 1}\n{"step": 2, "actor/pg_')
    checkpoint_of(folder, 2)
    with Recorder(folder, config) as recorder:
        recorder.record(3, {})
    assert [record["step"] for record in read_metrics(folder.metrics)] == [1, 3]


def test_figures_that_are_not_finite_keep_the_file_json(folder: RunFolder, config: Config) -> None:
    with Recorder(folder, config) as recorder:
        recorder.record(1, {"a": math.nan, "b": math.inf, "c": 1})
    record = json.loads(folder.metrics.read_text(), parse_constant=pytest.fail)
    assert (record["a"], record["b"], record["c"]) == (None, None, 1.0)


def test_iterations_and_validations_are_recorded_and_shown(
    folder: RunFolder, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with Recorder(folder, config) as recorder:
        recorder.iteration(1, {"episode/success_rate": 0.25})
        recorder.validation(1, {f"val/sampled/success_{name}": 0.5 for name in ("rate", "low", "high")})
    assert [sorted(record)[0] for record in read_metrics(folder.metrics)] == ["episode/success_rate", "step"]
    printed = capsys.readouterr().out
    assert "25.0" in printed
    assert "held-out sampled" in printed


def test_a_quiet_recorder_prints_nothing(folder: RunFolder, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config.logger.console = False
    with Recorder(folder, config) as recorder:
        recorder.iteration(1, {})
        with recorder.phase("rollout", 3) as advance:
            advance(3)
    assert capsys.readouterr().out == ""


def test_tensorboard_holds_the_same_curves(folder: RunFolder, config: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.logger.tensorboard = True
    with Recorder(folder, config) as recorder:
        recorder.record(1, {"actor/pg_loss": 0.5})
        recorder.record(2, {"actor/pg_loss": 0.25})
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/pg_loss")] == [(1, 0.5), (2, 0.25)]
