"""The loop. One iteration: collect, prepare, update, sync; docs/architecture.md follows a row through it."""

from __future__ import annotations

from megagent.algos.adjust import align
from megagent.algos.credit import step_returns
from megagent.algos.rewards import place_episode_reward
from megagent.config import Config
from megagent.run import Run, open_run


def train(run: Run) -> None:
    """Everything below is a verb of a role; no tensor maths and no placement appear here."""
    algo = run.config.algo
    run.sync()
    if run.starts_fresh:
        run.validate(iteration=0)
    elif run.owes_export:
        run.export(run.finished)
    for iteration in run.iterations():  # starts where the newest checkpoint ends
        with run.phase("rollout", total=run.episodes_per_iteration) as progress:
            episodes = run.collect(iteration, progress)
            rows = run.rows(episodes)
            run.hand_over()  # the devices, to the trainer
        with run.phase("prepare"):
            rows = step_returns(rows, algo)
            # Whole micro-batches on every rank; padding weighs nothing.
            rows = align(rows, run.schedule_multiple, algo.adjust, seed=iteration)
            rows = place_episode_reward(rows)
            rows = run.actor_log_probs(rows)  # teacher forcing, before any update of this iteration
            rows = run.reference_log_probs(rows)
            rows = run.values(rows)  # of the critic, if the estimator has one
            rows = run.charge(rows)  # penalty, KL in the reward, advantages
        with run.phase("update"):
            run.update_critic(rows)
            if run.actor_learns(iteration):
                run.update(rows)
        with run.phase("sync"):
            run.sync()
        run.record(iteration, episodes, rows)
        if run.saves(iteration):
            run.save(iteration)
        if run.exports(iteration):
            run.export(iteration)
        if run.validates(iteration):
            run.validate(iteration)
    run.export()


def main(config: Config) -> None:
    """Train as `config` says; every process of the run has ended when this returns or raises."""
    with open_run(config) as run:
        train(run)
