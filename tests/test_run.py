"""The verbs of a run, on stand-ins for its processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from megagent.batch import Jagged, StepBatch, objects
from megagent.config import Config
from megagent.errors import MegagentError
from megagent.observe.run_folder import RunFolder
from megagent.run import Run
from megagent.train import train


class Exporter:
    """Stands in for the ranks: what it exports says how often it has been asked."""

    def __init__(self) -> None:
        self.calls = 0

    def export_hf(self, folder: Path) -> None:
        self.calls += 1
        folder.mkdir()
        (folder / "weights").write_text(str(self.calls))


@contextmanager
def no_phase(*_: Any) -> Iterator[None]:
    yield


def run_in(folder: RunFolder, config: Config) -> Run:
    absent: dict[str, Any] = dict.fromkeys(("world", "rollout", "collector", "bridge"))
    recorder: Any = SimpleNamespace(phase=no_phase)
    actor: Any = Exporter()
    return Run(config=config, folder=folder, recorder=recorder, actor=actor, **absent)


def test_weights_are_exported_every_export_freq_iterations_and_not_twice_at_the_end(tmp_path: Path) -> None:
    config = Config()
    config.trainer.run_dir, config.trainer.iterations = str(tmp_path / "run"), 6
    with RunFolder.create(config) as folder:
        run = run_in(folder, config)
        assert not any(run.exports(iteration) for iteration in range(1, 7))
        config.trainer.export_freq = 2
        assert [iteration for iteration in range(1, 7) if run.exports(iteration)] == [2, 4]


def test_an_export_on_the_way_has_a_folder_of_its_own_which_a_later_one_replaces(tmp_path: Path) -> None:
    config = Config()
    config.trainer.run_dir = str(tmp_path / "run")
    with RunFolder.create(config) as folder:
        run = run_in(folder, config)
        run.export(2)
        run.export(2)
        run.export()
        assert (folder.root / "exports" / "iteration_0000002" / "weights").read_text() == "2"
        assert (folder.root / "export" / "weights").read_text() == "3"
        assert not list(folder.root.glob(".export*"))


def test_an_export_that_a_kill_came_before_is_made_up_for_when_the_run_goes_on(tmp_path: Path) -> None:
    config = Config()
    config.trainer.run_dir, config.trainer.iterations, config.trainer.export_freq = str(tmp_path / "run"), 6, 2
    with RunFolder.create(config) as folder:
        run = run_in(folder, config)
        owed = []
        for finished in (0, 2, 3, 6):
            run.finished = finished
            owed.append(finished > 0 and run.owes_export)
        assert owed == [False, True, False, False]
        run.finished = 2
        run.export(2)
        assert not run.owes_export
    verbs = Mock(starts_fresh=False, owes_export=True, finished=2)
    verbs.iterations.return_value = []
    train(verbs)
    assert verbs.export.call_args_list == [call(2), call()]


class Scorer:
    """Stands in for the ranks: its log-probs are `off` away from the engine's on the second row."""

    def __init__(self, off: float) -> None:
        self.off = off

    def log_probs(self, rows: StepBatch, model: str) -> dict[str, Jagged]:
        return {"log_probs": rows["responses"].like(torch.tensor([-1.0, -1.0, -1.0 - self.off]))}


def scored(off: float, **rollout: Any) -> tuple[Run, list[str]]:
    """A run that has asked for the trainer's log-probs, and what it said about them."""
    config = Config()
    config.model.dtype = "fp32"
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    said: list[str] = []
    recorder: Any = SimpleNamespace(warn=said.append)
    absent: dict[str, Any] = dict.fromkeys(("folder", "world", "rollout", "collector", "bridge"))
    actor: Any = Scorer(off)
    run = Run(config=config, recorder=recorder, actor=actor, **absent)
    responses = Jagged(torch.tensor([3, 4, 5]), torch.tensor([2, 1]))
    rows = StepBatch(
        {
            "prompts": Jagged(torch.tensor([1, 2]), torch.tensor([1, 1])),
            "responses": responses,
            "response_mask": responses.like(torch.ones(3)),
            "rollout_log_probs": responses.like(torch.full((3,), -1.0)),
            "traj_uid": objects(["goal/7/0", "goal/7/1"]),
            "step_index": torch.tensor([0, 2]),
        }
    )
    run.actor_log_probs(rows)
    return run, said


def test_agreement_of_engine_and_trainer_is_silent() -> None:
    run, said = scored(2e-4)  # a third of it on average
    assert (said, run.metrics["sampler/alarm"]) == ([], 0.0)


def test_a_disagreement_names_its_rows_and_the_run_goes_on() -> None:
    run, said = scored(0.3)
    [line] = said
    assert "differ by 0.1 on average, and rollout.agreement_max is 0.0001" in line
    assert line.endswith("1 of 2 rows are above it, the worst: step 3 of goal/7/1: 0.3.")
    assert run.metrics["sampler/alarm"] == 1.0


def test_a_disagreement_stops_the_run_where_it_should() -> None:
    with pytest.raises(MegagentError, match="step 3 of goal/7/1.*rollout.on_disagreement=stop"):
        scored(0.3, on_disagreement="stop")


def test_the_alarm_has_a_threshold_of_ones_own() -> None:
    assert scored(0.3, agreement_max=0.11)[1] == []
    assert len(scored(0.3, agreement_max=0.09)[1]) == 1


def test_log_probs_that_are_no_numbers_are_a_disagreement() -> None:
    [line] = scored(float("nan"))[1]
    assert "step 3 of goal/7/1" in line


class Shared:
    """Stands in for ranks, engines and bridge: notes who gives up or takes the devices."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def sleep(self) -> None:
        self.seen.append("engines sleep")

    def free_memory(self) -> None:
        self.seen.append("ranks free memory")

    def sync(self, *_: Any) -> dict[str, float]:
        self.seen.append("sync")
        return {}


@pytest.mark.parametrize(
    ("placement", "course"),
    [("colocated", ["engines sleep", "ranks free memory", "sync"]), ("disaggregated", ["sync"])],
)
def test_ranks_and_engines_take_turns_on_the_devices_that_they_share(placement: str, course: list[str]) -> None:
    config = Config()
    config.rollout.placement = placement
    absent: dict[str, Any] = dict.fromkeys(("folder", "recorder", "world", "collector"))
    shared: Any = Shared()
    run = Run(config=config, rollout=shared, actor=shared, bridge=shared, **absent)
    run.hand_over()
    run.sync()
    assert shared.seen == course


class Critic:
    """Stands in for the ranks: notes what it is asked for, and values every token 2."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def values(self, rows: StepBatch) -> Jagged:
        self.calls.append(("values", rows.names))
        return rows["responses"].like(torch.full((rows["responses"].tokens,), 2.0))

    def update_critic(self, rows: StepBatch, number: int) -> dict[str, float]:
        self.calls.append(("update_critic", rows.names))
        return {"critic/vf_loss": 1.0}


def run_with_critic(estimator: str) -> tuple[Run, Critic, StepBatch]:
    config = Config()
    config.algo.estimator, config.critic.warmup_iterations = estimator, 2
    absent: dict[str, Any] = dict.fromkeys(("folder", "recorder", "world", "rollout", "collector", "bridge"))
    actor: Any = Critic()
    responses = Jagged(torch.tensor([3, 4, 5]), torch.tensor([1, 2]))
    rows = StepBatch(
        {
            "prompts": Jagged(torch.tensor([1, 2]), torch.tensor([1, 1])),
            "responses": responses,
            "response_mask": responses.like(torch.ones(3)),
            "value_targets": responses.like(torch.tensor([1.0, 2.0, 3.0])),
        }
    )
    return Run(config=config, actor=actor, **absent), actor, rows


def test_gae_asks_the_critic_for_values_and_teaches_it() -> None:
    run, critic, rows = run_with_critic("gae")
    rows = run.values(rows)
    run.update_critic(rows)
    assert rows["values"].values.tolist() == [2.0, 2.0, 2.0]
    assert critic.calls == [
        ("values", ("prompts", "responses")),
        ("update_critic", ("prompts", "responses", "response_mask", "values", "value_targets")),
    ]
    assert run.metrics == {"critic/vf_loss": 1.0, "critic/vf_explained_var": 0.0}


def test_the_first_iterations_are_the_critics_alone() -> None:
    run, _, _ = run_with_critic("gae")
    assert [iteration for iteration in range(1, 5) if run.actor_learns(iteration)] == [3, 4]


def test_without_a_critic_nobody_is_asked_and_the_actor_learns_at_once() -> None:
    run, critic, rows = run_with_critic("gigpo")
    assert run.values(rows) is rows
    run.update_critic(rows)
    assert critic.calls == []
    assert run.actor_learns(1)


@pytest.mark.parametrize(("estimator", "greedy"), [("remax", True), ("gigpo", False)])
def test_a_greedy_episode_of_each_task_is_played_only_if_the_estimator_asks(estimator: str, greedy: bool) -> None:
    config = Config()
    config.algo.estimator, config.env.rollout.n = estimator, 3
    asked: list[Any] = []
    collector: Any = SimpleNamespace(prompts=SimpleNamespace(cut=0), collect=lambda *call: asked.append(call) or [])
    world: Any = SimpleNamespace(draw=lambda *_: ["task"])
    absent: dict[str, Any] = dict.fromkeys(("folder", "recorder", "actor", "rollout"))
    bridge: Any = SimpleNamespace(version=1)

    def progress(episodes: int) -> None: ...

    run = Run(config=config, world=world, collector=collector, bridge=bridge, **absent)
    run.collect(iteration=2, progress=progress)
    assert asked == [(["task"], 3, config.rollout.temperature, 2, progress, greedy)]
