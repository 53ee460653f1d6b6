"""`megagent train`, end to end: real ranks, a real engine, real environments, real files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.runs import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 120.0  # the machine may be busy


def finished(folder: Path, *overrides: str) -> LiveRun:
    run = LiveRun(folder, *overrides)
    status = run.wait()
    assert status == 0, run.output()
    return run


def iteration_record(run: LiveRun, iteration: int) -> dict[str, float]:
    [record] = [line for line in run.metrics() if line["step"] == iteration and "actor/lr" in line]
    return record


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """One iteration on TP2, as `make train` runs it."""
    return finished(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[list[LiveRun]]:
    """Runs that a test starts and that must not outlive it."""
    runs: list[LiveRun] = []
    yield runs
    for run in runs:
        run.end()


def assert_trained(run: LiveRun) -> None:
    record = iteration_record(run, 1)
    # Sampler and trainer hold the same weights in fp32: their log-probs differ by rounding only.
    assert record["sampler/log_prob_diff/max"] < 1e-4
    assert record["sampler/alarm"] == 0
    assert record["sync/version"] == 2
    assert record["sync/bytes"] == record.get("sync/bytes_minimum", record["sync/bytes"])
    assert record["rollout/rows"] >= 8
    assert record["episode/length/mean"] >= 1
    assert record["actor/lr"] > 0
    held_out = [line for line in run.metrics() if "val/sampled/success_rate" in line]
    assert [line["step"] for line in held_out] == [0, 1]
    assert all(line["val/greedy/tasks"] == 8 for line in held_out)


def test_a_run_leaves_everything_its_folder_promises(plain: LiveRun) -> None:
    assert_trained(plain)
    folder = plain.folder
    assert "webshop_tiny" in (folder / "config.yaml").read_text()
    assert len(json.loads((folder / "world.json").read_text())["digest"]) == 64
    assert list((folder / "tensorboard").glob("events.*"))
    assert (folder / "checkpoints" / "latest").exists()
    recorded = sorted(path.name for path in (folder / "episodes").iterdir())
    assert recorded == [f"iteration-000{i}-{kind}.jsonl" for i in (0, 1) for kind in ("greedy", "sampled")]
    episode = json.loads((folder / "episodes" / recorded[0]).read_text().splitlines()[0])
    assert episode["steps"]


def test_nothing_outlives_a_finished_run(plain: LiveRun) -> None:
    assert plain.leftovers(within_s=PATIENCE_S) == []


def test_the_exported_model_is_the_trained_one(plain: LiveRun) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megagent.model_source import model_folder

    trained = AutoModelForCausalLM.from_pretrained(plain.folder / "export", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(model_folder("builtin:webshop_tiny"), dtype=torch.float32)
    moved = [
        float((after - before).abs().max())
        for after, before in zip(trained.parameters(), start.parameters(), strict=True)
    ]
    assert max(moved) > 0
    # Adam moves a weight by about the learning rate a step, and the run takes at most two steps.
    assert max(moved) < 5 * iteration_record(plain, 1)["actor/lr"]
    assert AutoTokenizer.from_pretrained(plain.folder / "export").encode("click[buy now]")


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(plain: LiveRun) -> None:
    before = {path: path.read_bytes() for path in sorted(plain.folder.rglob("*")) if path.is_file()}
    second = LiveRun(plain.folder)
    assert second.wait() == 2
    assert "already holds a run" in second.output()
    assert "trainer.resume=true" in second.output()
    assert "Traceback" not in second.output()
    after = {path: path.read_bytes() for path in sorted(plain.folder.rglob("*")) if path.is_file()}
    assert after == before


def test_a_resumed_run_goes_on_after_the_newest_checkpoint(plain: LiveRun) -> None:
    resumed = finished(plain.folder, "trainer.resume=true", "trainer.iterations=2")
    record = iteration_record(resumed, 2)
    assert record["sampler/log_prob_diff/max"] < 1e-4
    assert [line["step"] for line in resumed.metrics() if "actor/lr" in line] == [1, 2]
    # The reference is still the policy that the first run began with.
    assert record["actor/kl_loss"] > 0


@pytest.mark.parametrize(
    ("overrides", "sentences"),
    [
        (
            ("rollout.max_prompt_tokens=12",),
            ("longer than rollout.max_prompt_tokens=12", "Set rollout.max_prompt_tokens="),
        ),
        (("env.catalog=/nowhere",), ("env.catalog=/nowhere", "no such folder")),
        (("model.path=/nowhere/model",), ("model.path=/nowhere/model", "no such folder")),
    ],
    ids=["prompt", "catalogue", "model"],
)
def test_bad_input_ends_before_anything_starts(
    tmp_path: Path, overrides: tuple[str, ...], sentences: tuple[str, ...], live: list[LiveRun]
) -> None:
    run = LiveRun(tmp_path / "run", *overrides)
    live.append(run)
    assert run.wait(100) == 2
    assert all(sentence in run.output() for sentence in sentences)
    assert "Traceback" not in run.output()
    assert not (tmp_path / "run").exists()  # refused before the run folder, hence before Ray


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel=tp2_pp2", "rollout.sync_checksums=true"),
        ("rollout.tp=2", "rollout.sync=gloo", "rollout.placement=disaggregated", "algo=remax"),
    ],
    ids=" ".join,
)
def test_other_layouts_and_ways_of_the_weights_run_the_same_job(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = finished(tmp_path / "run", *overrides)
    assert_trained(run)
    # remax plays a greedy episode of each task beside the others; their metrics are not mixed.
    assert ("rollout/greedy_success" in iteration_record(run, 1)) is ("algo=remax" in overrides)
    assert run.leftovers(within_s=PATIENCE_S) == []


def test_ppo_trains_with_a_critic_on_two_replicas_that_share_rows_by_tokens(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", "parallel=dp2", "rollout.engines=2", "algo=ppo", "trainer.micro_batch_tokens=2048")
    assert_trained(run)
    record = iteration_record(run, 1)
    assert 0 < record["schedule/padding_waste"] < 0.5
    assert 0 <= record["schedule/dp_imbalance"] < 1
    assert record["critic/lr"] > 0
    assert record["critic/grad_norm"] > 0
    assert (run.folder / "checkpoints" / "iteration_0000001" / "critic").is_dir()
    assert run.leftovers(within_s=PATIENCE_S) == []


def test_another_environment_is_trained_by_the_same_loop(tmp_path: Path) -> None:
    """Sokoban, two iterations, with weights through a file; nobody expects the tiny model, which has never seen a room,
    to win."""
    run = finished(
        tmp_path / "run",
        "experiment=sokoban_tiny",
        "rollout.sync=gather",
        "trainer.iterations=2",
        "env.max_steps=4",
        "env.moves=4",
        "env.rooms=32",
    )
    records = [iteration_record(run, iteration) for iteration in (1, 2)]
    assert all(record["sampler/log_prob_diff/max"] < 1e-4 for record in records)
    assert [record["sync/version"] for record in records] == [2, 3]
    assert json.loads((run.folder / "world.json").read_text())["env"]["moves"] == 4
    episode = json.loads((run.folder / "episodes" / "iteration-0000-sampled.jsonl").read_text().splitlines()[0])
    assert episode["steps"][0]["page"].startswith("######\n")


def test_the_tiny_agent_trains_on_the_real_products(tmp_path: Path) -> None:
    catalog = os.environ.get("MEGAGENT_WEBSHOP_DATA")
    if not catalog:
        pytest.skip("set MEGAGENT_WEBSHOP_DATA to the folder with items_shuffle_1000.json.gz to train on real products")
    run = finished(
        tmp_path / "run",
        f"env.catalog={catalog}",
        "env.max_steps=4",
    )
    record = iteration_record(run, 1)
    assert record["sampler/log_prob_diff/max"] < 1e-4
    assert record["rollout/lost_episodes"] == 0
    assert record["prompt_length/max"] <= 256
    world = json.loads((run.folder / "world.json").read_text())
    assert (world["env"]["catalog"], world["env"]["compat"]) == (catalog, "none")


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_ends_every_process(
    tmp_path: Path, live: list[LiveRun], sent: signal.Signals, status: int
) -> None:
    run = LiveRun(tmp_path / "run", "trainer.iterations=1000", "trainer.test_freq=1000")
    live.append(run)
    run.wait_for("iteration", lambda: any("actor/lr" in line for line in run.metrics()))
    assert len(run.processes()) > 5  # driver, Ray, two ranks, engine, environments
    run.process.send_signal(sent)
    assert run.leftovers(within_s=PATIENCE_S) == []
    assert run.wait() == status
    assert "Traceback" not in run.output()


def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path, live: list[LiveRun]) -> None:
    run = LiveRun(tmp_path / "run", "trainer.iterations=1000", "trainer.test_freq=1000")
    live.append(run)
    run.wait_for("iteration", lambda: any("actor/lr" in line for line in run.metrics()))
    [rank, *_] = [process for process in run.processes() if "RankActor" in " ".join(process.cmdline())]
    rank.send_signal(signal.SIGKILL)
    assert run.wait(90) == 2
    assert "rank" in run.output()
    assert "died" in run.output()
    assert run.leftovers(within_s=PATIENCE_S) == []


def test_a_driver_that_is_killed_leaves_no_orphans(tmp_path: Path, live: list[LiveRun]) -> None:
    run = LiveRun(tmp_path / "run", "trainer.iterations=1000", "trainer.test_freq=1000", "rollout.tp=2")
    live.append(run)
    run.wait_for("iteration", lambda: any("actor/lr" in line for line in run.metrics()))
    psutil.Process(run.process.pid).kill()
    # Ray's own two agents hold neither memory nor cores; they notice after a minute or two that their node is gone.
    assert run.leftovers(within_s=PATIENCE_S, but=("ray::DashboardAgent", "ray::RuntimeEnvAgent")) == []
