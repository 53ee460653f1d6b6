"""Everything a run is made of, put together: processes, data, records. `train.py` says what happens with it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from megagent.algos.credit import charge
from megagent.algos.kl import KL_COEF_METRIC, KL_METRIC, adapted_kl_coef, mean_kl, resumed_kl_coef
from megagent.algos.metrics import credit_metrics
from megagent.algos.schedule import schedule_multiple
from megagent.algos.values import explained_variance
from megagent.batch import StepBatch
from megagent.cluster.bridge import Bridge, open_bridge
from megagent.cluster.engines import EngineGroup
from megagent.cluster.environments import EnvironmentGroup
from megagent.cluster.placement import Placement
from megagent.cluster.ranks import RankGroup
from megagent.cluster.session import ray_session
from megagent.config import Config
from megagent.envs.base import Split, World, build_world
from megagent.errors import MegagentError
from megagent.model_source import load_tokenizer
from megagent.observe.recorder import Recorder, read_metrics
from megagent.observe.run_folder import RunFolder
from megagent.parallel import platform
from megagent.rollout.collector import Collector
from megagent.rollout.episode import Episode, step_rows
from megagent.rollout.metrics import (
    AGREEMENT_MAX,
    disagreement,
    require_version,
    rollout_metrics,
    sampler_metrics,
    validation_metrics,
)
from megagent.rollout.prompts import PromptBuilder

VALIDATION_SEED = 1_000_003  # the same draws at every validation, whatever the iteration and trainer.seed
FIRST_PROMPTS = 1000  # tasks of a panel whose first prompts are looked at before anything starts


@dataclass
class Run:
    """The parts of one training run and the verbs of `train.py`. Made by `open_run`, which also ends its processes."""

    config: Config
    folder: RunFolder
    recorder: Recorder
    world: World
    actor: RankGroup  # holds the reference's weights too, and the critic's
    rollout: EngineGroup
    collector: Collector
    bridge: Bridge
    finished: int = 0  # iterations done before this process started
    iteration: int = 0  # the one under way
    kl_coef: float = 0.0  # of the KL in the reward, as it is now
    metrics: dict[str, float] = field(default_factory=dict)  # of the iteration under way

    # --- the course of the run ---------------------------------------------------------------------------------------

    @property
    def starts_fresh(self) -> bool:
        return self.finished == 0

    def iterations(self) -> Iterator[int]:
        """The numbers of the iterations still to do, from 1."""
        for iteration in range(self.finished + 1, self.config.trainer.iterations + 1):
            self.iteration, self.metrics = iteration, {}
            yield iteration

    def validates(self, iteration: int) -> bool:
        return iteration % self.config.trainer.test_freq == 0 or self._is_last(iteration)

    def saves(self, iteration: int) -> bool:
        every = self.config.trainer.save_freq
        return self._is_last(iteration) or (every > 0 and iteration % every == 0)

    def exports(self, iteration: int) -> bool:
        """Whether weights are exported on the way; at the end they always are."""
        every = self.config.trainer.export_freq
        return every > 0 and iteration % every == 0 and not self._is_last(iteration)

    @property
    def owes_export(self) -> bool:
        """Whether this run was killed between a checkpoint and the export of the same iteration."""
        return self.exports(self.finished) and not self.folder.export_of(self.finished).exists()

    def _is_last(self, iteration: int) -> bool:
        return iteration == self.config.trainer.iterations

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Time a phase of the iteration and show it; yields a function that advances its progress bar."""
        start = time.monotonic()
        with self.recorder.phase(name, total) as advance:
            yield advance
        self.metrics[f"timing_s/{name}"] = time.monotonic() - start

    # --- collect -----------------------------------------------------------------------------------------------------

    @property
    def episodes_per_iteration(self) -> int:
        return self.config.trainer.tasks_per_iteration * self.config.env.rollout.n

    def collect(self, iteration: int, progress: Callable[[int], None]) -> list[Episode]:
        """env.rollout.n episodes of each of the iteration's tasks, sampled with the newest weights.

        And a greedy one of each, if the estimator asks for it.
        """
        trainer = self.config.trainer
        tasks = self.world.draw("train", trainer.tasks_per_iteration, trainer.seed, iteration)
        seed = trainer.seed * 100_003 + iteration
        n, temperature, cut = self.config.env.rollout.n, self.config.rollout.temperature, self.collector.prompts.cut
        episodes = self.collector.collect(tasks, n, temperature, seed, progress, self.config.plays_greedily)
        require_version(episodes, self.bridge.version)
        self.metrics["rollout/cut_prompts"] = float(self.collector.prompts.cut - cut)
        return episodes

    def rows(self, episodes: Sequence[Episode]) -> StepBatch:
        return step_rows(episodes)

    def hand_over(self) -> None:
        """The rollout is over: engines that share the trainer's devices sleep until the next sync."""
        if self.config.rollout.placement == "colocated":
            self.rollout.sleep()

    # --- prepare, update, sync ---------------------------------------------------------------------------------------

    @cached_property
    def schedule_multiple(self) -> int:
        """Rows come in multiples of this, so that every rank gets whole micro-batches."""
        return schedule_multiple(self.config)

    def actor_log_probs(self, rows: StepBatch) -> StepBatch:
        """Adds old_log_probs, and notes how far the sampler's own log-probs are from them.

        Raises MegagentError if that is too far and rollout.on_disagreement=stop.
        """
        answer = self.actor.log_probs(rows.select("prompts", "responses"), "actor")
        rows = rows.with_columns(old_log_probs=answer["log_probs"])
        self.metrics |= sampler_metrics(rows)
        rollout = self.config.rollout
        alarm = disagreement(rows, rollout.agreement_max or AGREEMENT_MAX[self.config.model.dtype])
        self.metrics["sampler/alarm"] = float(alarm is not None)
        if alarm is not None and rollout.on_disagreement == "stop":
            raise MegagentError(
                f"{alarm} The run stops, as rollout.on_disagreement=stop says; see docs/weight_sync.md."
            )
        if alarm is not None:
            self.recorder.warn(alarm)
        return rows

    def reference_log_probs(self, rows: StepBatch) -> StepBatch:
        """Adds ref_log_probs, those of the policy that the run began with, if the loss asks for them."""
        if not self.config.algo.kl_coef:
            return rows
        answer = self.actor.log_probs(rows.select("prompts", "responses"), "reference")
        return rows.with_columns(ref_log_probs=answer["log_probs"])

    def values(self, rows: StepBatch) -> StepBatch:
        """Adds values, what the critic expects before each token is written, if the estimator asks for them."""
        if not self.config.has_critic:
            return rows
        return rows.with_columns(values=self.actor.values(rows.select("prompts", "responses")))

    def update_critic(self, rows: StepBatch) -> None:
        if not self.config.has_critic:
            return
        columns = ("prompts", "responses", "response_mask", "values", "value_targets")
        self.metrics |= self.actor.update_critic(rows.select(*columns), self.iteration)
        self.metrics["critic/vf_explained_var"] = explained_variance(rows)

    def actor_learns(self, iteration: int) -> bool:
        """The first critic.warmup_iterations are the critic's alone."""
        return not self.config.has_critic or iteration > self.config.critic.warmup_iterations

    def charge(self, rows: StepBatch) -> StepBatch:
        """Adds advantages; see algos.credit. A KL in the reward is charged at kl_coef, which then adapts."""
        algo = self.config.algo
        rows = charge(rows, algo, self.kl_coef)
        if algo.kl_in == "reward" and algo.kl_coef:
            kl = mean_kl(rows, algo.kl_estimator)
            self.metrics |= {KL_METRIC: kl, KL_COEF_METRIC: self.kl_coef}
            self.kl_coef = adapted_kl_coef(self.kl_coef, kl, self.episodes_per_iteration, algo)
        return rows

    def update(self, rows: StepBatch) -> None:
        columns = ("prompts", "responses", "response_mask", "old_log_probs", "ref_log_probs", "advantages")
        self.metrics |= self.actor.update(rows.select(*(name for name in columns if name in rows)), self.iteration)

    def sync(self) -> None:
        """The engines serve the actor's weights, on devices that are theirs again until `hand_over`."""
        if self.config.rollout.placement == "colocated":
            self.actor.free_memory()
        self.metrics |= self.bridge.sync(self.actor, self.rollout)

    # --- records -----------------------------------------------------------------------------------------------------

    def record(self, iteration: int, episodes: Sequence[Episode], rows: StepBatch) -> None:
        self.metrics |= rollout_metrics(episodes, rows) | credit_metrics(rows, self.config.algo)
        phases = ("rollout", "prepare", "update", "sync")
        self.metrics["timing_s/iteration"] = sum(self.metrics[f"timing_s/{name}"] for name in phases)
        tokens = self.metrics["rollout/response_tokens"]
        self.metrics["rollout/tokens_per_s"] = tokens / self.metrics["timing_s/rollout"]
        self.recorder.iteration(iteration, self.metrics)

    def validate(self, iteration: int) -> None:
        """One episode of each of trainer.val_tasks held-out tasks; again greedily if trainer.val_greedy."""
        trainer = self.config.trainer
        count = min(trainer.val_tasks, len(self.world.tasks("validation")))
        number = 1 + -(-iteration // trainer.test_freq)  # one validation before the first iteration
        tasks = self.world.draw("validation", count, trainer.seed, number)
        temperatures = [trainer.val_temperature] + ([0.0] if trainer.val_greedy else [])
        metrics: dict[str, float] = {}
        for temperature in dict.fromkeys(temperatures):
            with self.recorder.phase("validation", len(tasks)) as advance:
                episodes = self.collector.collect(tasks, 1, temperature, VALIDATION_SEED, advance)
            metrics |= validation_metrics(episodes, greedy=temperature == 0)
            self.recorder.episodes(iteration, temperature, episodes[: self.config.logger.episodes])
        self.recorder.validation(iteration, metrics)

    def save(self, iteration: int) -> None:
        with self.recorder.phase("checkpoint"):
            self.actor.save(self.folder.checkpoints, iteration)

    def export(self, iteration: int | None = None) -> None:
        """The policy as a Hugging Face folder, of an iteration or the end; an earlier one stays until it is whole."""
        target = self.folder.export if iteration is None else self.folder.export_of(iteration)
        fresh = self.folder.root / ".export.new"
        with self.recorder.phase("export"):
            shutil.rmtree(fresh, ignore_errors=True)
            self.actor.export_hf(fresh)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            fresh.rename(target)


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """A run with all its processes, which end with the block however it ends.

    Light things come first: a bad catalogue, model or run folder is reported before Ray starts.
    """
    with ExitStack() as stack:
        world = build_world(config.env)
        world.draw("train", config.trainer.tasks_per_iteration, config.trainer.seed, 1)  # raises if it cannot
        tokenizer = load_tokenizer(config.model.path)
        _check_first_prompts(world, PromptBuilder(config.env, config.rollout, tokenizer))
        folder = stack.enter_context(RunFolder.create(config, world.digest))
        recorder = stack.enter_context(Recorder(folder, config, tokenizer.decode))
        with recorder.phase("start"):
            stack.enter_context(ray_session(config))
            kind = platform.resolve(config.cluster.platform)
            placement = Placement(config, kind)
            ranks = RankGroup(config, placement)
            if kind == "cuda" and config.rollout.placement == "colocated":
                # On GPUs that both share, an engine measures what is free and takes its part of that.
                ranks.wait_until_started()
            engines = EngineGroup(config, placement)
            stack.callback(engines.close)
            environments = EnvironmentGroup(config.env)
            stack.callback(environments.close)
            ranks.wait_until_started()
            engines.wait_until_started()
            bridge = open_bridge(config, kind, placement, ranks, engines)
            stack.callback(bridge.close)
        finished = ranks.load(folder.checkpoints) if folder.finished_iterations else 0
        yield Run(
            config=config,
            folder=folder,
            recorder=recorder,
            world=world,
            actor=ranks,
            rollout=engines,
            collector=Collector(config, tokenizer, engines, environments),
            bridge=bridge,
            kl_coef=resumed_kl_coef(
                read_metrics(folder.metrics) if finished else (),
                config.trainer.tasks_per_iteration * config.env.rollout.n,
                config.algo,
            ),
            finished=finished,
        )


def _check_first_prompts(world: World, prompts: PromptBuilder) -> None:
    """Raises MegagentError if the wordiest of many tasks does not even fit into the first prompt of its episodes."""
    environment = world.make()
    panels: tuple[Split, ...] = ("train", "validation")
    for panel in panels:
        tasks = world.tasks(panel)
        some = range(0, len(tasks), -(-len(tasks) // FIRST_PROMPTS))
        first = [environment.reset(tasks[index]) for index in some]
        prompts.require_fit(max(first, key=lambda observation: len(observation.task)))
