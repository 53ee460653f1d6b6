"""The typed configuration: one dataclass for each Hydra group, and `Config` that holds them all.

Defaults are the seed recipe (WebShop, GiGPO); configs/ holds the groups and experiments that override them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    path: str = "Qwen/Qwen2.5-1.5B-Instruct"  # a Hugging Face folder, a hub id, or builtin:webshop_tiny
    dtype: str = "bf16"  # fp32 | bf16, of the parameters in training and rollout


@dataclass
class ParallelConfig:
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline stages
    dp: int = 1  # data-parallel replicas
    vpp: int = 1  # model chunks of each stage, run in turn; more than 1 asks for pp above 1
    ep: int = 1  # expert-parallel ranks: the experts are divided among them; taken out of tp x dp
    etp: int = 0  # tensor-parallel ranks of an expert; 0: as tp
    sequence_parallel: bool = False  # split norms and residuals over the tp ranks by token
    distributed_optimizer: bool = True  # split the optimizer's state over the dp ranks

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass
class RolloutConfig:
    tp: int = 1  # vLLM tensor-parallel ranks of one engine
    engines: int = 1  # engines that share the prompts
    placement: str = "colocated"  # engines take turns with the ranks on their GPUs; disaggregated: GPUs of their own
    n: int = 1  # samples of the engine for one prompt; groups are sampled by env.rollout.n, so it stays 1
    temperature: float = 1.0
    max_prompt_tokens: int = 4096
    max_response_tokens: int = 512
    max_sequences: int = 256  # sequences that the engine decodes at once
    memory_fraction: float = 0.5  # CUDA: share of the device memory for weights and KV cache
    kv_cache_gib: int = 1  # CPU: size of the KV cache
    enforce_eager: bool = False
    sync: str = "auto"  # how weights come: auto | shared_memory | cuda_ipc | gloo | nccl | gather; docs/weight_sync.md
    sync_checksums: bool = False  # compare a checksum of every tensor after each sync
    sync_dir: str = "/dev/shm"  # sync=gather: where the file of whole weights lies; a folder that all nodes share
    agreement_max: float = 0.0  # mean |log-prob of engine - of trainer| that raises the alarm; 0: by dtype
    on_disagreement: str = "warn"  # warn | stop


@dataclass
class AlgoConfig:
    # Advantages
    estimator: str = (
        "gigpo"  # gigpo | grpo | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline | step_returns | ...
    )
    norm: str = "mean_norm"  # mean_norm | mean_std_norm
    baseline: str = "step"  # the mean of a task is over its step rows (as the reference), or once for each trajectory
    gamma: float = 0.95  # discount of an episode's steps
    step_weight: float = 1.0  # weight w of the step advantage in gigpo
    step_groups: str = "exact"  # steps of one task are compared if their pages are equal (exact), or similar
    similarity: float = 0.95  # least difflib ratio of the characters of similar pages
    lone_step: str = "zero"  # step advantage of a step alone in its group: zero | raw (its return) | task (against it)
    gae_over: str = "steps"  # gae runs over the steps of an episode, or over the tokens of each step
    gae_lambda: float = 0.95
    token_gamma: float = 1.0  # discount of the tokens of a response, in reinforce_pp and gae over tokens
    compat: str = "none"  # verl_agent: its gigpo to the last digit, float32 statistics included
    invalid_action_penalty: float = 0.1
    penalty_propagates: bool = False  # the penalty also lowers the discounted returns of the steps before
    # Policy loss
    loss: str = "ppo"  # ppo | gspo | cispo
    aggregation: str = "token-mean"  # token-mean | seq-mean-token-sum | seq-mean-token-mean
    clip: float = 0.2  # ratios count from 1 - clip
    clip_high: float = 0.0  # to 1 + clip_high; 0: as clip
    dual_clip: float = 0.0  # ppo: times its advantage, the most that a bad token counts; above 1, 0: no limit
    entropy_coef: float = 0.001
    # KL to the reference
    kl_coef: float = 0.01
    kl_in: str = "loss"  # loss | reward
    kl_estimator: str = "low_var_kl"  # k1 | k2 | k3 = low_var_kl; with a + the gradient is that of k2
    kl_target: float = 0.0  # kl_in=reward: kl_coef is adapted until the KL of a token is this; 0: it stays
    kl_horizon: int = 10000  # episodes over which it adapts
    # Sampler and trainer
    sampler_correction: str = "none"  # none | token_tis | sequence_tis | token_mask | sequence_mask
    sampler_ratio_max: float = 2.0  # trainer-to-sampler probability ratios are held to it, or masked above it
    sampler_ratio_min: float = 0.5  # and masked below this
    # Rows
    adjust: str = "pad"  # rows up to the schedule's multiple: pad (they weigh nothing) | copy | delete


@dataclass
class EnvRolloutConfig:
    n: int = 8  # episodes of one task: the size of a group


@dataclass(frozen=True)
class Range:
    """The numbers that a key may have."""

    low: float
    high: float = math.inf
    above_low: bool = False  # low itself is not allowed
    below_high: bool = False  # high itself is not allowed

    def holds(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        low = value > self.low if self.above_low else value >= self.low
        return low and (value < self.high if self.below_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'more than' if self.above_low else 'at least'} {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and {'less than' if self.below_high else 'at most'} {self.high:g}"


def number(default: float, low: float, high: float = math.inf) -> Any:
    """A field of an environment's own configuration: a number from low to high, both included."""
    return field(default=default, metadata={"range": Range(low, high)})


def one_of(default: str, *others: str) -> Any:
    """A field of an environment's own configuration: one of these words."""
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass(frozen=True)
class ReplyRules:
    """How a model's reply becomes an action. The defaults are the honest ones."""

    tail_acts: bool = False  # a reply without action tags acts through its last 20 characters
    valid_if_offered: bool = True  # an action is valid only if the page offers it
    whole_thought: bool = True  # a thought is an opening and then a closing tag; the action is not empty


@dataclass
class EnvConfig:
    """What every environment has. Each adds its own keys in a subclass, which `megagent.envs.WORLDS` names."""

    name: str = "webshop"  # webshop | sokoban
    prompt: str = "webshop"  # webshop | webshop_compact | sokoban
    max_steps: int = 15
    history_length: int = 2
    success_reward: float = 10.0
    workers: int = 0  # Ray actors that host the environments; 0: one a core of each node, but one core, at most 16
    retries: int = 2  # times that an episode is played again after its worker died or went silent
    start_timeout_s: float = 600.0  # deadline for opening the catalogue
    step_timeout_s: float = 60.0  # deadline of a batch of resets or steps
    rollout: EnvRolloutConfig = field(default_factory=EnvRolloutConfig)

    @property
    def reply_rules(self) -> ReplyRules:
        return ReplyRules()

    def problems(self) -> Iterator[tuple[str, str]]:
        """(name of the field, sentence) of every fault that the fields' own rules do not find."""
        yield from ()


@dataclass
class TrainerConfig:
    iterations: int = 150
    tasks_per_iteration: int = 16
    mini_batch_rows: int = 64  # rows (steps) of one optimizer step, over all data-parallel ranks
    micro_batch_rows: int = 4  # rows of one forward-backward on one rank
    log_prob_micro_batch_rows: int = 8  # rows of one forward without gradients on one rank
    micro_batch_tokens: int = 0  # instead of the two above: tokens of either on one rank, padding included; 0: by rows
    pack_rows: bool = False  # rows of a micro-batch lie end to end instead of each padded to the longest
    epochs: int = 1
    lr: float = 1e-6
    lr_warmup_iterations: int = 0
    lr_decay: str = "constant"  # constant | linear | cosine, to 0 over trainer.iterations
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    clip_grad: float = 1.0
    test_freq: int = 5  # iterations between validations
    val_tasks: int = 128
    val_temperature: float = 0.4
    val_greedy: bool = False  # also validate at temperature 0
    save_freq: int = 0  # iterations between checkpoints; 0 saves at the end only
    export_freq: int = 0  # iterations between exports as a Hugging Face folder; 0 exports at the end only
    seed: int = 0
    run_dir: str = "runs/${experiment_name}"
    resume: bool = False  # continue from the newest checkpoint in run_dir


@dataclass
class SftConfig:
    episodes: int = 6000  # scripted episodes
    steps: int = 2200  # optimizer steps
    batch_rows: int = 16
    lr: float = 2e-3
    warmup_steps: int = 50
    prompt_weight: float = 0.1  # loss weight of a prompt token; a response token weighs 1
    short_prompt_fraction: float = 0.65  # first share of the steps, on prompts without history
    output: str = "runs/sft"  # where the warm-started Hugging Face model goes


@dataclass
class CriticConfig:
    # The value model of algo.estimator=gae. It begins with the weights of model.path, in batches as the actor's.
    lr: float = 1e-5  # with the warm-up and decay of trainer
    warmup_iterations: int = 0  # first iterations, in which only the critic learns
    clip: float = 0.5  # how far a value counts as moved in one update


@dataclass
class ClusterConfig:
    platform: str = "auto"  # auto | cpu | cuda
    nodes: int = 1
    gpus_per_node: int = 8
    ray_address: str = "local"  # local starts Ray in this process; else host:port
    timeout_s: float = 1800.0  # deadline of any single call to a rank or an engine
    threads: int = 1  # CPU: threads of each rank and of each engine worker


@dataclass
class LoggerConfig:
    console: bool = True
    tensorboard: bool = True
    episodes: int = 8  # validation episodes recorded each time


@dataclass
class Config:
    experiment_name: str = "webshop_gigpo"
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def has_critic(self) -> bool:
        """Whether the estimator asks for the values of a critic."""
        return self.algo.estimator == "gae"

    @property
    def plays_greedily(self) -> bool:
        """Whether the estimator asks for a greedy episode of every task."""
        return self.algo.estimator == "remax"


def as_yaml(config: Config) -> str:
    """The configuration as YAML, every reference resolved, in the order of the schema."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
