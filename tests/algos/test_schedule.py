from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagent.algos.adjust import align
from megagent.algos.choices import ADJUSTMENTS
from megagent.algos.schedule import (
    ScheduleSizes,
    aligned_rows,
    batch_plan,
    batch_problems,
    divisors,
    row_multiple,
    schedule_multiple,
    schedule_problems,
    schedule_table,
    sft_batch_problems,
    token_multiple,
)
from megagent.batch import StepBatch
from megagent.config import Config, ParallelConfig, TrainerConfig


def test_the_seed_recipe_aligns_1890_rows_to_1920() -> None:
    """Passes of 16 x 2 and 8 x 2 rows need a multiple of 32; so do mini-batches of 32 rows."""
    sizes = TrainerConfig(mini_batch_rows=32, micro_batch_rows=8, log_prob_micro_batch_rows=16)
    multiple = schedule_multiple(Config(parallel=ParallelConfig(dp=2), trainer=sizes))
    assert multiple == 32
    assert -(-1890 // multiple) * multiple == 1920


def test_whole_mini_batches_are_part_of_the_multiple() -> None:
    sizes = TrainerConfig(mini_batch_rows=64, micro_batch_rows=8, log_prob_micro_batch_rows=16)
    assert schedule_multiple(Config(parallel=ParallelConfig(dp=2), trainer=sizes)) == 64


def test_tensor_and_pipeline_ranks_do_not_multiply_rows() -> None:
    alone = schedule_multiple(Config(parallel=ParallelConfig(dp=2)))
    assert schedule_multiple(Config(parallel=ParallelConfig(tp=4, pp=2, dp=2))) == alone


def test_passes_that_a_run_does_not_have_are_not_in_its_table() -> None:
    names = {row.name for row in batch_plan(Config())}
    assert "rows of one reference pass over all ranks" in names
    assert "rows of one critic pass over all ranks" not in names
    config = Config()
    config.algo.estimator, config.algo.kl_coef = "gae", 0.0
    names = {row.name for row in batch_plan(config)}
    assert "rows of one reference pass over all ranks" not in names
    assert "rows of one critic pass over all ranks" in names


def test_the_table_of_the_default_recipe() -> None:
    config = Config()
    config.parallel.dp = 2
    plan = {row.name: row.value for row in batch_plan(config)}
    assert plan == {
        "tasks an iteration": 16,
        "episodes an iteration": 128,
        "rows an iteration, at least": 128,
        "rows an iteration, at most": 1920,
        "rows of one old log-prob pass over all ranks": 16,
        "rows of one reference pass over all ranks": 16,
        "rows of one actor pass over all ranks": 8,
        "rows of one mini-batch": 64,
        "multiple": 64,
        "aligned rows, at most": 1920,
        "rows of one rank, at most": 960,
        "mini-batches an iteration, at most": 30,
        "optimizer steps an iteration, at most": 30,
        "micro-batches of one mini-batch on one rank": 8,
        "log-prob micro-batches of one rank, at most": 120,
        "tokens of a row, at most": 4608,
        "tokens of a training micro-batch, at most": 18432,
        "tokens of a log-prob micro-batch, at most": 36864,
        "tokens an iteration, at most": 4608 * 1920,
    }


def test_the_table_of_micro_batches_by_tokens() -> None:
    """A micro-batch of 16,384 tokens holds at least 3 rows: 22 of them hold 64 rows, 11 on each of two replicas."""
    config = changed({"parallel.dp": 2, "trainer.micro_batch_tokens": 16384})
    plan = {row.name: row.value for row in batch_plan(config)}
    assert plan["multiple"] == plan["rows of one mini-batch"] == 64
    assert plan["tokens of a micro-batch, at most"] == 16384
    assert plan["micro-batches of one mini-batch on one rank, at most"] == 11
    assert plan["log-prob micro-batches of one rank, at most"] == 320
    assert not any("rows of one actor pass" in name or "training micro-batch" in name for name in plan)


def test_by_tokens_the_interleaved_schedule_wants_whole_groups() -> None:
    config = changed({"parallel.pp": 4, "parallel.vpp": 2, "trainer.micro_batch_tokens": 16384})
    plan = {row.name: row.value for row in batch_plan(config)}
    assert plan["micro-batches of one mini-batch on one rank, at most"] == 24


def test_by_tokens_a_mini_batch_need_not_divide_among_the_replicas() -> None:
    assert batch_problems(changed({"parallel.dp": 3, "trainer.micro_batch_tokens": 16384})) == []
    assert sft_batch_problems(changed({"parallel.dp": 3, "trainer.micro_batch_tokens": 16384})) == []


SEED = ScheduleSizes(dp=2, tp=2, pp=2, log_prob_rows=16, reference_rows=16, actor_rows=8)


def test_the_table_of_the_seed_recipe() -> None:
    """16 rows x 2, 16 x 2 and 8 x 2 need a multiple of 32: 1890 rows become 1920."""
    table = [(row.name, row.value) for row in schedule_table(SEED, 1890)]
    assert table == [
        ("rows of one old log-prob pass over all ranks", 32),
        ("rows of one reference pass over all ranks", 32),
        ("rows of one actor pass over all ranks", 16),
        ("multiple", 32),
        ("rows", 1890),
        ("aligned rows", 1920),
        ("rows of one rank", 960),
    ]


def test_every_divisor_says_how_it_comes_about() -> None:
    sizes = ScheduleSizes(dp=2, pp=4, vpp=2, log_prob_rows=8, actor_rows=2, critic_rows=4, mini_batch_rows=64)
    assert [(row.value, row.how) for row in divisors(sizes, {"dp": "parallel.dp"})] == [
        (64, "parallel.dp 2 x log_prob_rows 8 x interleaved group 4"),
        (16, "parallel.dp 2 x actor_rows 2 x interleaved group 4"),
        (32, "parallel.dp 2 x critic_rows 4 x interleaved group 4"),
        (64, "mini_batch_rows, all ranks together"),
    ]


def test_ranks_that_share_rows_multiply_nothing() -> None:
    assert row_multiple(replace(SEED, tp=8, cp=4)) == row_multiple(SEED) == 32


def test_the_interleaved_schedule_wants_whole_groups() -> None:
    assert row_multiple(replace(SEED, vpp=2)) == 64
    assert row_multiple(replace(SEED, vpp=2, interleaved_group=3)) == 96
    assert row_multiple(replace(SEED, vpp=2, pp=1)) == 32  # one stage has no pipeline to fill


def test_tokens_of_a_row_come_in_parts_for_tp_and_cp() -> None:
    assert token_multiple(ScheduleSizes(tp=4)) == 1
    assert token_multiple(ScheduleSizes(tp=4), sequence_parallel=True) == 4
    assert token_multiple(ScheduleSizes(tp=4, cp=2), sequence_parallel=True) == 16


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            ScheduleSizes(dp=2, critic_rows=4, mini_batch_rows=20),
            "mini_batch_rows=20 is not a multiple of 8 (dp 2 x critic_rows 4), so the ranks cannot share it",
        ),
        (
            ScheduleSizes(pp=4, vpp=2, interleaved_group=2),
            "interleaved_group=2 is below pp=4: a chunk's next micro-batch would wait for one",
        ),
    ],
)
def test_sizes_that_cannot_work_are_told_with_their_fix(sizes: ScheduleSizes, sentence: str) -> None:
    [problem] = schedule_problems(sizes)
    assert problem.startswith(sentence)
    assert "; use " in problem


@pytest.mark.parametrize("mode", ADJUSTMENTS)
@given(rows=st.integers(0, 300), multiple=st.integers(1, 64))
def test_the_number_of_aligned_rows_is_known_beforehand(mode: str, rows: int, multiple: int) -> None:
    batch = StepBatch({"step_index": torch.arange(rows)})
    assert len(align(batch, multiple, mode)) == aligned_rows(rows, multiple, mode)


def test_the_default_recipe_has_no_problems() -> None:
    assert batch_problems(Config()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rollout.n": 8},
            "rollout.n=8: groups are sampled by the environment; set env.rollout.n=8 and leave rollout.n=1",
        ),
        (
            {"env.rollout.n": 1},
            "env.rollout.n=1: algo.estimator=gigpo compares the episodes of a task, so a group needs at least 2",
        ),
        (
            {"parallel.dp": 3},
            "trainer.mini_batch_rows=64 is not a multiple of 12 (parallel.dp 3 x trainer.micro_batch_rows 4), so",
        ),
        (
            {"trainer.mini_batch_rows": 4096},
            "trainer.mini_batch_rows=4096: 16 x 8 episodes cannot fill it (at most 1920 rows an iteration)",
        ),
        (
            {"trainer.log_prob_micro_batch_rows": 61},
            "filled up to a multiple of 3904 rows, but 16 x 8 episodes have at most 1920; use a size that divides 64",
        ),
        ({"trainer.micro_batch_rows": 0}, "trainer.micro_batch_rows=0: it must be at least 1"),
        (
            {"trainer.micro_batch_tokens": 4607},
            "tokens (rollout.max_prompt_tokens=4096 + rollout.max_response_tokens=512), and a micro-batch must hold it",
        ),
        (
            {"trainer.micro_batch_tokens": 4608, "rollout.max_response_tokens": 511, "parallel.tp": 10}
            | {"parallel.sequence_parallel": True},
            "a row may have 4610 tokens",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_told_with_its_fix(changes: dict[str, int | str], sentence: str) -> None:
    problems = batch_problems(changed(changes))
    assert any(sentence in problem for problem in problems), problems


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp", "remax"])
def test_an_estimator_that_compares_no_episodes_needs_one_of_a_task(estimator: str) -> None:
    assert batch_problems(changed({"env.rollout.n": 1, "algo.estimator": estimator})) == []


def test_actor_and_critic_are_told_of_their_micro_batches_by_one_key_and_once() -> None:
    config = changed({"algo.estimator": "gae", "trainer.mini_batch_rows": 6})
    assert len([problem for problem in batch_problems(config) if "trainer.micro_batch_rows 4" in problem]) == 1
    config = changed({"algo.estimator": "gae"})
    [critic] = [row for row in batch_plan(config) if "critic pass" in row.name]
    assert critic.how == "parallel.dp 1 x trainer.micro_batch_rows 4"


def test_the_warm_start_shares_its_rows_equally() -> None:
    assert sft_batch_problems(changed({"parallel.dp": 2})) == []
    problems = sft_batch_problems(changed({"parallel.dp": 2, "sft.batch_rows": 7}))
    assert problems == ["sft.batch_rows=7 cannot be shared equally by parallel.dp=2 ranks; use 6 or 8"]


def test_all_problems_are_told_together() -> None:
    assert len(batch_problems(changed({"rollout.n": 2, "parallel.dp": 3, "env.rollout.n": 1}))) >= 3


def changed(changes: dict[str, int | str]) -> Config:
    config = Config()
    for path, value in changes.items():
        *groups, name = path.split(".")
        target: object = config
        for group in groups:
            target = getattr(target, group)
        setattr(target, name, value)
    return config
