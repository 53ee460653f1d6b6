"""The batch arithmetic of a configuration: what divides what, and what an iteration looks like.

Pure Python over integers, so that a configuration can be checked and its table printed without torch.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megagent.config import Config, ParallelConfig, TrainerConfig


class PlanRow(NamedTuple):
    """One line of the batch table: a number, and how it comes about."""

    name: str
    value: int
    how: str


def schedule_divisors(parallel: ParallelConfig, trainer: TrainerConfig) -> list[PlanRow]:
    """Every number of rows that must divide an aligned batch, with its reason.

    Ranks count by dp: the tp and pp ranks of one replica work on the same rows.
    """
    dp = parallel.dp
    return [
        PlanRow(
            "rows of one log-prob pass over all ranks",
            dp * trainer.log_prob_micro_batch_rows,
            f"parallel.dp {dp} x trainer.log_prob_micro_batch_rows {trainer.log_prob_micro_batch_rows}",
        ),
        PlanRow(
            "rows of one training pass over all ranks",
            dp * trainer.micro_batch_rows,
            f"parallel.dp {dp} x trainer.micro_batch_rows {trainer.micro_batch_rows}",
        ),
        PlanRow("rows of one mini-batch", trainer.mini_batch_rows, "trainer.mini_batch_rows, all ranks together"),
    ]


def schedule_multiple(parallel: ParallelConfig, trainer: TrainerConfig) -> int:
    """The rows of an aligned batch are a multiple of this: whole micro-batches on every rank, whole mini-batches."""
    return lcm(*(divisor.value for divisor in schedule_divisors(parallel, trainer)))


def batch_plan(config: Config) -> list[PlanRow]:
    """The batch table of --dry-run. Needs a configuration without batch_problems."""
    parallel, trainer, env, rollout = config.parallel, config.trainer, config.env, config.rollout
    episodes = trainer.tasks_per_iteration * env.rollout.n
    most = episodes * env.max_steps
    divisors = schedule_divisors(parallel, trainer)
    multiple = schedule_multiple(parallel, trainer)
    aligned = -(-most // multiple) * multiple
    mini_batches = aligned // trainer.mini_batch_rows
    mini_batch_rank_rows = trainer.mini_batch_rows // parallel.dp
    row_tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    return [
        PlanRow("tasks an iteration", trainer.tasks_per_iteration, "trainer.tasks_per_iteration"),
        PlanRow("episodes an iteration", episodes, f"x env.rollout.n {env.rollout.n}"),
        PlanRow("rows an iteration, at least", episodes, "every episode has a step"),
        PlanRow("rows an iteration, at most", most, f"{episodes} episodes x env.max_steps {env.max_steps}"),
        *divisors,
        PlanRow("multiple", multiple, "least common multiple of " + ", ".join(str(row.value) for row in divisors)),
        PlanRow("aligned rows, at most", aligned, f"{most} rows filled up to a multiple of {multiple}"),
        PlanRow("rows of one rank, at most", aligned // parallel.dp, f"{aligned} / parallel.dp {parallel.dp}"),
        PlanRow("mini-batches an iteration, at most", mini_batches, f"{aligned} / {trainer.mini_batch_rows} rows"),
        PlanRow(
            "optimizer steps an iteration, at most",
            mini_batches * trainer.epochs,
            f"{mini_batches} mini-batches x trainer.epochs {trainer.epochs}",
        ),
        PlanRow(
            "micro-batches of one mini-batch on one rank",
            mini_batch_rank_rows // trainer.micro_batch_rows,
            f"{mini_batch_rank_rows} rows / trainer.micro_batch_rows {trainer.micro_batch_rows}",
        ),
        PlanRow(
            "log-prob micro-batches of one rank, at most",
            aligned // divisors[0].value,
            f"{aligned // parallel.dp} rows / trainer.log_prob_micro_batch_rows {trainer.log_prob_micro_batch_rows}",
        ),
        PlanRow(
            "tokens of a row, at most",
            row_tokens,
            f"prompt {rollout.max_prompt_tokens} + response {rollout.max_response_tokens}",
        ),
        PlanRow(
            "tokens of a training micro-batch, at most",
            row_tokens * trainer.micro_batch_rows,
            f"x trainer.micro_batch_rows {trainer.micro_batch_rows}",
        ),
        PlanRow(
            "tokens of a log-prob micro-batch, at most",
            row_tokens * trainer.log_prob_micro_batch_rows,
            f"x trainer.log_prob_micro_batch_rows {trainer.log_prob_micro_batch_rows}",
        ),
        PlanRow("tokens an iteration, at most", row_tokens * aligned, f"x {aligned} rows"),
    ]


def batch_problems(config: Config) -> list[str]:
    """Sentences (value, rule, fix) for the batch sizes that cannot work together; empty if all can."""
    sizes = _sizes(config)
    problems = [f"{name}={value}: it must be at least 1" for name, value in sizes.items() if value < 1]
    if problems:
        return problems  # the rest would divide by them

    parallel, trainer = config.parallel, config.trainer
    if config.rollout.n != 1:
        problems.append(
            f"rollout.n={config.rollout.n}: groups are sampled by the environment; "
            f"set env.rollout.n={config.rollout.n} and leave rollout.n=1"
        )
    if config.env.rollout.n < 2:
        problems.append(
            f"env.rollout.n={config.env.rollout.n}: advantages compare the episodes of a task, so a group needs at "
            "least 2; use env.rollout.n=8"
        )
    pass_rows = parallel.dp * trainer.micro_batch_rows
    if trainer.mini_batch_rows % pass_rows:
        problems.append(
            f"trainer.mini_batch_rows={trainer.mini_batch_rows} is not a multiple of {pass_rows} (parallel.dp "
            f"{parallel.dp} x trainer.micro_batch_rows {trainer.micro_batch_rows}), so the ranks cannot share it in "
            f"whole micro-batches; use {_multiples_near(trainer.mini_batch_rows, pass_rows)}"
        )
    problems.extend(_iteration_problems(config))
    return problems


def sft_batch_problems(config: Config) -> list[str]:
    """As batch_problems, for the supervised warm start; a training run does not care."""
    rows, dp = config.sft.batch_rows, config.parallel.dp
    if dp < 1 or rows % dp == 0:
        return []
    return [
        f"sft.batch_rows={rows} cannot be shared equally by parallel.dp={dp} ranks; use {_multiples_near(rows, dp)}"
    ]


def _iteration_problems(config: Config) -> list[str]:
    parallel, trainer, env = config.parallel, config.trainer, config.env
    most = trainer.tasks_per_iteration * env.rollout.n * env.max_steps
    episodes = f"{trainer.tasks_per_iteration} x {env.rollout.n} episodes"
    if trainer.mini_batch_rows > most:
        sentence = (
            f"trainer.mini_batch_rows={trainer.mini_batch_rows}: {episodes} cannot fill it (at most {most} rows an "
            "iteration); use fewer rows, or more trainer.tasks_per_iteration"
        )
        return [sentence]
    multiple = schedule_multiple(parallel, trainer)
    if multiple > most:
        sentence = (
            f"trainer.log_prob_micro_batch_rows={trainer.log_prob_micro_batch_rows}: with mini-batches of "
            f"{trainer.mini_batch_rows} rows and parallel.dp={parallel.dp} a batch is filled up to a multiple of "
            f"{multiple} rows, but {episodes} have at most {most}; use a size that divides "
            f"{max(trainer.mini_batch_rows // parallel.dp, 1)}"
        )
        return [sentence]
    return []


def _sizes(config: Config) -> dict[str, int]:
    return {
        "parallel.dp": config.parallel.dp,
        "rollout.n": config.rollout.n,
        "rollout.max_prompt_tokens": config.rollout.max_prompt_tokens,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "env.rollout.n": config.env.rollout.n,
        "env.max_steps": config.env.max_steps,
        "trainer.tasks_per_iteration": config.trainer.tasks_per_iteration,
        "trainer.mini_batch_rows": config.trainer.mini_batch_rows,
        "trainer.micro_batch_rows": config.trainer.micro_batch_rows,
        "trainer.log_prob_micro_batch_rows": config.trainer.log_prob_micro_batch_rows,
        "trainer.epochs": config.trainer.epochs,
    }


def _multiples_near(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)
