"""The batch arithmetic of a configuration: what divides what, and what an iteration looks like.

Pure Python over integers, so that a configuration can be checked and its table printed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import TYPE_CHECKING, NamedTuple

from megagent.algos.choices import ALONE

if TYPE_CHECKING:
    from megagent.config import Config


class PlanRow(NamedTuple):
    """One line of the batch table: a number, and how it comes about."""

    name: str
    value: int
    how: str


@dataclass(frozen=True)
class ScheduleSizes:
    """What the Megatron schedule is made of, as plain numbers. Rows are those of one micro-batch on one rank.

    A rank is part of one data-parallel replica; its tp, pp and cp ranks work on the same rows and multiply nothing. A
    pass that a run does not have is None. interleaved_group: micro-batches that a model chunk runs in a row before the
    next chunk does (Megatron's microbatch_group_size_per_vp_stage), at least pp; as pp if not given.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    log_prob_rows: int | None = None
    reference_rows: int | None = None
    actor_rows: int | None = None
    critic_rows: int | None = None
    mini_batch_rows: int | None = None
    interleaved_group: int | None = None

    @property
    def micro_batch_multiple(self) -> int:
        """Micro-batches of a pass come in multiples of this: whole groups of the interleaved schedule; else 1."""
        if self.pp == 1 or self.vpp == 1:
            return 1
        return self.pp if self.interleaved_group is None else self.interleaved_group


def divisors(sizes: ScheduleSizes, names: Mapping[str, str] | None = None) -> list[PlanRow]:
    """Every number of rows that must divide an aligned batch, with its reason.

    The rows of a pass over all ranks are dp x the rows of a micro-batch x the micro-batches that must come together;
    whole mini-batches divide it too, and the training passes divide a mini-batch (see schedule_problems). names: how to
    call a size in a reason, for instance where it is a key of the configuration.
    """
    named = names or {}
    group = sizes.micro_batch_multiple
    rows = []
    for what, field, value in (
        ("old log-prob", "log_prob_rows", sizes.log_prob_rows),
        ("reference", "reference_rows", sizes.reference_rows),
        ("actor", "actor_rows", sizes.actor_rows),
        ("critic", "critic_rows", sizes.critic_rows),
    ):
        if value is not None:
            how = f"{named.get('dp', 'dp')} {sizes.dp} x {named.get(field, field)} {value}"
            how += f" x interleaved group {group}" if group > 1 else ""
            rows.append(PlanRow(f"rows of one {what} pass over all ranks", sizes.dp * value * group, how))
    if sizes.mini_batch_rows is not None:
        name = named.get("mini_batch_rows", "mini_batch_rows")
        rows.append(PlanRow("rows of one mini-batch", sizes.mini_batch_rows, f"{name}, all ranks together"))
    return rows


def row_multiple(sizes: ScheduleSizes) -> int:
    """The least number that all divisors divide: an aligned batch has a multiple of it."""
    return lcm(*(divisor.value for divisor in divisors(sizes)))


def token_multiple(sizes: ScheduleSizes, sequence_parallel: bool = False) -> int:
    """Tokens of a padded row come in multiples of this: equal parts for the tp ranks of sequence parallelism, and two
    parts, one early and one late, for each of the cp ranks."""
    return (sizes.tp if sequence_parallel else 1) * (2 * sizes.cp if sizes.cp > 1 else 1)


def aligned_rows(rows: int, multiple: int, mode: str = "pad") -> int:
    """How many rows `align` makes of this many."""
    if mode == "delete" and rows > multiple:
        return rows // multiple * multiple
    return -(-rows // multiple) * multiple


def schedule_table(sizes: ScheduleSizes, rows: int) -> list[PlanRow]:
    """The divisors with their reasons, their least common multiple, and what becomes of `rows` rows in each mode."""
    found = divisors(sizes)
    multiple = row_multiple(sizes)
    filled, kept = aligned_rows(rows, multiple), aligned_rows(rows, multiple, "delete")
    return [
        *found,
        PlanRow("multiple", multiple, _lcm_of(found)),
        PlanRow("rows", rows, "as the episodes had steps"),
        PlanRow("aligned rows", filled, f"{filled - rows} added by pad (weightless) or copy; delete leaves {kept}"),
        PlanRow("rows of one rank", filled // sizes.dp, f"{filled} / dp {sizes.dp}"),
    ]


def schedule_problems(sizes: ScheduleSizes, names: Mapping[str, str] | None = None) -> list[str]:
    """Sentences (value, rule, fix) for sizes that cannot work together, whatever the number of rows."""
    named = names or {}
    problems = []
    group = sizes.interleaved_group
    if group is not None and sizes.vpp > 1 and group < sizes.pp:
        problems.append(
            f"interleaved_group={group} is below pp={sizes.pp}: a chunk's next micro-batch would wait for one that has "
            f"not come round; use {sizes.pp} or more"
        )
    mini = sizes.mini_batch_rows
    for field, value in (("actor_rows", sizes.actor_rows), ("critic_rows", sizes.critic_rows)):
        if mini is None or value is None:
            continue
        unit = sizes.dp * value * sizes.micro_batch_multiple
        if mini % unit:
            interleaved = f" x interleaved group {sizes.micro_batch_multiple}" if sizes.micro_batch_multiple > 1 else ""
            problems.append(
                f"{named.get('mini_batch_rows', 'mini_batch_rows')}={mini} is not a multiple of {unit} "
                f"({named.get('dp', 'dp')} {sizes.dp} x {named.get(field, field)} {value}{interleaved}), so the ranks "
                f"cannot share it in whole micro-batches; use {_multiples_near(mini, unit)}"
            )
    return list(dict.fromkeys(problems))  # where actor and critic have one name, they have one problem


# ---------------------------------------------------------------------------------------------------------------------
# Of a configuration
# ---------------------------------------------------------------------------------------------------------------------

_KEYS = {
    "dp": "parallel.dp",
    "log_prob_rows": "trainer.log_prob_micro_batch_rows",
    "reference_rows": "trainer.log_prob_micro_batch_rows",
    "actor_rows": "trainer.micro_batch_rows",
    "critic_rows": "trainer.micro_batch_rows",
    "mini_batch_rows": "trainer.mini_batch_rows",
}


def sizes_of(config: Config) -> ScheduleSizes:
    """The sizes of a configuration; log-probs of actor and reference are computed in the same micro-batches.

    Micro-batches by tokens take any number of rows: then only the mini-batch is one of the sizes.
    """
    parallel, trainer = config.parallel, config.trainer
    sizes = ScheduleSizes(
        dp=parallel.dp, tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, mini_batch_rows=trainer.mini_batch_rows
    )
    if trainer.micro_batch_tokens:
        return sizes
    return replace(
        sizes,
        log_prob_rows=trainer.log_prob_micro_batch_rows,
        reference_rows=trainer.log_prob_micro_batch_rows if config.algo.kl_coef else None,
        actor_rows=trainer.micro_batch_rows,
        critic_rows=trainer.micro_batch_rows if config.has_critic else None,
    )


def schedule_multiple(config: Config) -> int:
    """The rows of an aligned batch are a multiple of this: whole micro-batches on every rank, whole mini-batches."""
    return row_multiple(sizes_of(config))


def batch_plan(config: Config) -> list[PlanRow]:
    """The batch table of --dry-run. Needs a configuration without batch_problems."""
    trainer, env, rollout = config.trainer, config.env, config.rollout
    episodes = trainer.tasks_per_iteration * env.rollout.n
    most = episodes * env.max_steps
    found = divisors(sizes_of(config), _KEYS)
    multiple = schedule_multiple(config)
    mode = config.algo.adjust
    aligned = aligned_rows(most, multiple, mode)
    mini_batches = aligned // trainer.mini_batch_rows
    row_tokens = _row_tokens(config)
    micro_batches = _micro_batches_by_tokens if trainer.micro_batch_tokens else _micro_batches_by_rows
    return [
        PlanRow("tasks an iteration", trainer.tasks_per_iteration, "trainer.tasks_per_iteration"),
        PlanRow("episodes an iteration", episodes, f"x env.rollout.n {env.rollout.n}"),
        PlanRow("rows an iteration, at least", episodes, "every episode has a step"),
        PlanRow("rows an iteration, at most", most, f"{episodes} episodes x env.max_steps {env.max_steps}"),
        *found,
        PlanRow("multiple", multiple, _lcm_of(found)),
        PlanRow("aligned rows, at most", aligned, f"{most} rows, {_ADJUSTED[mode]} a multiple of {multiple}"),
        PlanRow("mini-batches an iteration, at most", mini_batches, f"{aligned} / {trainer.mini_batch_rows} rows"),
        PlanRow(
            "optimizer steps an iteration, at most",
            mini_batches * trainer.epochs,
            f"{mini_batches} mini-batches x trainer.epochs {trainer.epochs}",
        ),
        PlanRow(
            "tokens of a row, at most",
            row_tokens,
            f"prompt {rollout.max_prompt_tokens} + response {rollout.max_response_tokens}",
        ),
        *micro_batches(config, aligned),
        PlanRow("tokens an iteration, at most", row_tokens * aligned, f"x {aligned} rows"),
    ]


def _micro_batches_by_rows(config: Config, aligned: int) -> list[PlanRow]:
    dp, trainer, row_tokens = config.parallel.dp, config.trainer, _row_tokens(config)
    mini_batch_rows, rank_rows = trainer.mini_batch_rows // dp, aligned // dp
    training = f"trainer.micro_batch_rows {trainer.micro_batch_rows}"
    log_prob = f"trainer.log_prob_micro_batch_rows {trainer.log_prob_micro_batch_rows}"
    return [
        PlanRow("rows of one rank, at most", rank_rows, f"{aligned} / parallel.dp {dp}"),
        PlanRow(
            "micro-batches of one mini-batch on one rank",
            mini_batch_rows // trainer.micro_batch_rows,
            f"{mini_batch_rows} rows / {training}",
        ),
        PlanRow(
            "log-prob micro-batches of one rank, at most",
            rank_rows // trainer.log_prob_micro_batch_rows,
            f"{rank_rows} rows / {log_prob}",
        ),
        PlanRow(
            "tokens of a training micro-batch, at most",
            row_tokens * trainer.micro_batch_rows,
            f"{row_tokens} x {training}",
        ),
        PlanRow(
            "tokens of a log-prob micro-batch, at most",
            row_tokens * trainer.log_prob_micro_batch_rows,
            f"{row_tokens} x {log_prob}",
        ),
    ]


def _micro_batches_by_tokens(config: Config, aligned: int) -> list[PlanRow]:
    trainer, multiple = config.trainer, sizes_of(config).micro_batch_multiple
    longest_rows = trainer.micro_batch_tokens // _row_tokens(config)
    unit = config.parallel.dp * multiple
    how = f"in micro-batches of {longest_rows} of the longest, over parallel.dp {config.parallel.dp}"
    how += f", in groups of {multiple}" if multiple > 1 else ""

    def most(rows: int) -> int:
        return ceil(ceil(rows / longest_rows) / unit) * multiple

    mini_batch_rows = trainer.mini_batch_rows
    return [
        PlanRow(
            "tokens of a micro-batch, at most", trainer.micro_batch_tokens, "trainer.micro_batch_tokens, with padding"
        ),
        PlanRow(
            "micro-batches of one mini-batch on one rank, at most",
            most(mini_batch_rows),
            f"{mini_batch_rows} rows {how}",
        ),
        PlanRow("log-prob micro-batches of one rank, at most", most(aligned), f"{aligned} rows {how}"),
    ]


def _row_tokens(config: Config) -> int:
    """The longest row as a micro-batch may have to hold it."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def batch_problems(config: Config) -> list[str]:
    """Sentences (value, rule, fix) for the batch sizes that cannot work together; empty if all can."""
    sizes = _sizes(config)
    problems = [f"{name}={value}: it must be at least 1" for name, value in sizes.items() if value < 1]
    if problems:
        return problems  # the rest would divide by them

    if config.rollout.n != 1:
        problems.append(
            f"rollout.n={config.rollout.n}: groups are sampled by the environment; "
            f"set env.rollout.n={config.rollout.n} and leave rollout.n=1"
        )
    if config.env.rollout.n < 2 and config.algo.estimator not in ALONE:
        problems.append(
            f"env.rollout.n={config.env.rollout.n}: algo.estimator={config.algo.estimator} compares the episodes of a "
            "task, so a group needs at least 2; use env.rollout.n=8"
        )
    problems.extend(schedule_problems(sizes_of(config), _KEYS))
    problems.extend(_budget_problems(config))
    problems.extend(_iteration_problems(config))
    return problems


def _budget_problems(config: Config) -> list[str]:
    budget, rollout = config.trainer.micro_batch_tokens, config.rollout
    unit = token_multiple(sizes_of(config), config.parallel.sequence_parallel)
    longest = -(-_row_tokens(config) // unit) * unit
    if not budget or longest <= budget:
        return []
    parts = f", for the {unit} ranks of parallel.sequence_parallel" if unit > 1 else ""
    sentence = (
        f"trainer.micro_batch_tokens={budget}: a row may have {longest} tokens (rollout.max_prompt_tokens="
        f"{rollout.max_prompt_tokens} + rollout.max_response_tokens={rollout.max_response_tokens}{parts}), and a "
        f"micro-batch must hold it; use {longest} or more"
    )
    return [sentence]


def sft_batch_problems(config: Config) -> list[str]:
    """As batch_problems, for the supervised warm start; a training run does not care."""
    rows, dp = config.sft.batch_rows, config.parallel.dp
    if dp < 1 or rows % dp == 0 or config.trainer.micro_batch_tokens:
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
    multiple = schedule_multiple(config)
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


_ADJUSTED = {"pad": "filled up with weightless rows to", "copy": "filled up with copies to", "delete": "cut down to"}


def _lcm_of(found: Sequence[PlanRow]) -> str:
    return "least common multiple of " + ", ".join(str(row.value) for row in found)


def _multiples_near(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)
