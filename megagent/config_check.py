"""What a configuration must fulfil before anything heavy starts: ranges, names, and values that fit each other.

`check` collects every fault. A combination is judged only if all the keys it is about are sound by themselves, so one
mistyped number is one line and not five.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megagent.algos.choices import CHOICES, ESTIMATORS, algo_problems
from megagent.algos.schedule import batch_problems, sft_batch_problems
from megagent.config import Config, Range
from megagent.envs.base import WORLDS
from megagent.errors import ConfigError, MegagentError
from megagent.model_source import ASSETS, BUILTIN, hf_config_of, local_folder
from megagent.observe.run_folder import already_holds_run, holds_run
from megagent.parallel.degrees import degrees_of, training_problems
from megagent.parallel.models import Architecture, architecture_of
from megagent.parallel.reshard.vllm import Workers
from megagent.paths import expanded
from megagent.rollout.prompts import PROMPTS

Command = Literal["train", "sft"]


class Faults:
    """Faults of one configuration, in the order found, and the keys they are about."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.keys: set[str] = set()

    def add(self, text: str, *keys: str) -> None:
        """keys: those that are wrong by themselves; nothing more is said about combinations they are part of."""
        if text not in self.texts:  # two checks may find the same
            self.texts.append(text)
        self.keys.update(keys)

    def sound(self, *keys: str) -> bool:
        """Whether no fault was found so far in any of these keys, or, for a section, in any key of it."""
        return not any(
            bad == key or bad.startswith(f"{key}.") or key.startswith(f"{bad}.") for bad in self.keys for key in keys
        )

    def report(self) -> None:
        """Raises ConfigError if there is any fault."""
        if self.texts:
            raise ConfigError(self.texts)


def validate(config: Config, command: Command | None = None) -> None:
    """Raises ConfigError with all faults of a configuration. command: as for `megagent.config_load.load`."""
    faults = Faults()
    check(config, faults, command)
    faults.report()


def check(config: Config, faults: Faults, command: Command | None = None) -> None:
    """Adds every fault of the configuration to `faults`."""
    _check_ranges(config, faults)
    _check_names(config, faults)
    _check_algo(config, faults)
    _check_sampling(config, faults)
    _check_batches(config, faults, command)
    _check_degrees(config, faults)
    _check_model(config, faults, command)
    _check_cluster(config, faults)
    _check_environment(config, faults)
    _check_lengths_of_training(config, faults)
    if command is not None:
        _check_machine(config, faults, command)


# ---------------------------------------------------------------------------------------------------------------------
# Values by themselves
# ---------------------------------------------------------------------------------------------------------------------


AT_LEAST_ONE = Range(1)
NOT_NEGATIVE = Range(0)
ABOVE_ZERO = Range(0, above_low=True)
SHARE = Range(0, 1)
BETA = Range(0, 1, below_high=True)

RANGES: Mapping[str, Range] = {
    "parallel.tp": AT_LEAST_ONE,
    "parallel.pp": AT_LEAST_ONE,
    "parallel.dp": AT_LEAST_ONE,
    "parallel.vpp": AT_LEAST_ONE,
    "parallel.ep": AT_LEAST_ONE,
    "parallel.etp": NOT_NEGATIVE,
    "rollout.tp": AT_LEAST_ONE,
    "rollout.engines": AT_LEAST_ONE,
    "rollout.n": AT_LEAST_ONE,
    # Greedy episodes of a group are all the same and teach nothing; vLLM raises anything below 0.01 to it.
    "rollout.temperature": Range(0.01),
    "rollout.max_prompt_tokens": AT_LEAST_ONE,
    "rollout.max_response_tokens": AT_LEAST_ONE,
    "rollout.max_sequences": AT_LEAST_ONE,
    "rollout.memory_fraction": Range(0, 1, above_low=True),
    "rollout.kv_cache_gib": AT_LEAST_ONE,
    "rollout.agreement_max": NOT_NEGATIVE,
    "algo.gamma": SHARE,
    "algo.step_weight": NOT_NEGATIVE,
    "algo.similarity": SHARE,
    "algo.gae_lambda": SHARE,
    "algo.token_gamma": SHARE,
    "algo.invalid_action_penalty": NOT_NEGATIVE,
    "algo.clip": Range(0, 1, above_low=True, below_high=True),
    "algo.clip_high": NOT_NEGATIVE,
    "algo.dual_clip": NOT_NEGATIVE,
    "algo.entropy_coef": NOT_NEGATIVE,
    "algo.kl_coef": NOT_NEGATIVE,
    "algo.kl_target": NOT_NEGATIVE,
    "algo.kl_horizon": AT_LEAST_ONE,
    # Sampler and trainer agree at a ratio of 1: limits on one side of it would hold back what is right.
    "algo.sampler_ratio_max": AT_LEAST_ONE,
    "algo.sampler_ratio_min": SHARE,
    "env.max_steps": AT_LEAST_ONE,
    "env.history_length": NOT_NEGATIVE,
    "env.success_reward": ABOVE_ZERO,
    "env.workers": NOT_NEGATIVE,
    "env.retries": NOT_NEGATIVE,
    "env.start_timeout_s": ABOVE_ZERO,
    "env.step_timeout_s": ABOVE_ZERO,
    "env.rollout.n": AT_LEAST_ONE,
    "trainer.iterations": AT_LEAST_ONE,
    "trainer.tasks_per_iteration": AT_LEAST_ONE,
    "trainer.mini_batch_rows": AT_LEAST_ONE,
    "trainer.micro_batch_rows": AT_LEAST_ONE,
    "trainer.log_prob_micro_batch_rows": AT_LEAST_ONE,
    "trainer.micro_batch_tokens": NOT_NEGATIVE,
    "trainer.epochs": AT_LEAST_ONE,
    "trainer.lr": ABOVE_ZERO,
    "trainer.lr_warmup_iterations": NOT_NEGATIVE,
    "trainer.weight_decay": NOT_NEGATIVE,
    "trainer.adam_beta1": BETA,
    "trainer.adam_beta2": BETA,
    "trainer.clip_grad": ABOVE_ZERO,
    "trainer.test_freq": AT_LEAST_ONE,
    "trainer.val_tasks": AT_LEAST_ONE,
    "trainer.val_temperature": NOT_NEGATIVE,
    "trainer.save_freq": NOT_NEGATIVE,
    "trainer.export_freq": NOT_NEGATIVE,
    "trainer.seed": Range(0, 2**31 - 1),  # what every library takes
    "critic.lr": ABOVE_ZERO,
    "critic.warmup_iterations": NOT_NEGATIVE,
    "critic.clip": ABOVE_ZERO,
    "sft.episodes": AT_LEAST_ONE,
    "sft.steps": AT_LEAST_ONE,
    "sft.batch_rows": AT_LEAST_ONE,
    "sft.lr": ABOVE_ZERO,
    "sft.warmup_steps": NOT_NEGATIVE,
    "sft.prompt_weight": NOT_NEGATIVE,
    "sft.short_prompt_fraction": SHARE,
    "cluster.nodes": AT_LEAST_ONE,
    "cluster.gpus_per_node": AT_LEAST_ONE,
    "cluster.timeout_s": ABOVE_ZERO,
    "cluster.threads": AT_LEAST_ONE,
    "logger.episodes": NOT_NEGATIVE,
}
NOT_EMPTY = ("experiment_name", "model.path", "trainer.run_dir", "sft.output", "rollout.sync_dir")


# How weights come to the engines: transport -> (platforms it serves, whether it ends at the node)
SYNCS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "shared_memory": (("cpu",), True),
    "cuda_ipc": (("cuda",), True),
    "gloo": (("cpu", "cuda"), False),
    "nccl": (("cuda",), False),
}


def _check_ranges(config: Config, faults: Faults) -> None:
    for key, value in values(config):
        allowed = RANGES.get(key)
        if allowed is not None and not allowed.holds(value) and faults.sound(key):
            faults.add(f"{key}={value}: must be a number, {allowed}", key)
        if key in NOT_EMPTY and not value and faults.sound(key):
            faults.add(f"{key}: must not be empty", key)


def values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a configuration, in the schema's order."""
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from values(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def _check_names(config: Config, faults: Faults) -> None:
    found = dict(values(config))
    choices: dict[str, tuple[str, ...]] = {
        "model.dtype": ("fp32", "bf16"),
        "rollout.placement": ("colocated", "disaggregated"),
        "rollout.sync": ("auto", *SYNCS, "gather"),
        "rollout.on_disagreement": ("warn", "stop"),
        "algo.estimator": _estimators(config.algo.estimator),
        **CHOICES,
        "trainer.lr_decay": ("constant", "linear", "cosine"),
        "env.name": tuple(WORLDS),
        "env.prompt": tuple(PROMPTS),
        "cluster.platform": ("auto", "cpu", "cuda"),
    }
    for key, names in choices.items():
        if found[key] not in names and faults.sound(key):
            faults.add(f"{key}={found[key]}: there is no such choice; use {_listed(list(names), 'or')}", key)
    _check_address(config, faults)


def _estimators(chosen: str) -> tuple[str, ...]:
    """Names of the advantage estimators. The registry imports torch, so it is asked only for one that is not ours."""
    if chosen in ESTIMATORS:
        return ESTIMATORS
    from megagent.algos import advantages

    return tuple(advantages.ESTIMATORS)


def _check_address(config: Config, faults: Faults) -> None:
    address = config.cluster.ray_address
    if (
        address != "local"
        and not ((found := re.fullmatch(r"[^:/\s]+:(\d{1,5})", address)) and 0 < int(found[1]) < 65536)
        and faults.sound("cluster.ray_address")
    ):
        faults.add(
            f"cluster.ray_address={address}: must be local, or host:port as `ray start --head` prints it",
            "cluster.ray_address",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Values that must fit each other
# ---------------------------------------------------------------------------------------------------------------------


def _check_algo(config: Config, faults: Faults) -> None:
    if faults.sound("algo"):
        for problem in algo_problems(config):
            faults.add(problem)


def _check_sampling(config: Config, faults: Faults) -> None:
    n = config.rollout.n
    if n != 1 and faults.sound("rollout.n"):
        faults.add(
            f"rollout.n={n}: groups are sampled by the environment; set env.rollout.n={n} and leave rollout.n=1",
            "rollout.n",
        )


def _check_batches(config: Config, faults: Faults, command: Command | None) -> None:
    if not faults.sound("parallel", "trainer", "env"):
        return
    for problem in [*batch_problems(config), *(sft_batch_problems(config) if command == "sft" else [])]:
        faults.add(problem)


def _check_degrees(config: Config, faults: Faults) -> None:
    if faults.sound("parallel"):
        for problem in degrees_of(config.parallel).problems():
            faults.add(problem)


def _check_model(config: Config, faults: Faults, command: Command | None) -> None:
    path = config.model.path
    if not faults.sound("model.path"):
        return
    if command == "sft" and path.startswith(BUILTIN) and not (ASSETS / path.removeprefix(BUILTIN)).exists():
        return  # it is about to be made for the first time
    name = path.removeprefix(BUILTIN).rstrip("/").rsplit("/", 1)[-1]
    try:
        architecture = architecture_of(hf_config_of(path, fetch=command is not None))
    except MegagentError as error:
        faults.add(f"model.path={path}: {error}", "model.path")
        return
    if faults.sound("parallel"):
        _check_split(config, architecture, name, faults)
    if faults.sound("rollout.tp"):
        _check_rollout_split(config, architecture, name, faults)
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    context = architecture.positions
    if longest > context and faults.sound("rollout.max_prompt_tokens", "rollout.max_response_tokens"):
        faults.add(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + rollout.max_response_tokens="
            f"{rollout.max_response_tokens}: {name} has {context} positions; lower one of them"
        )


def _check_split(config: Config, architecture: Architecture, model: str, faults: Faults) -> None:
    """Adds why the ranks cannot share the model as parallel.* says, with the degrees that fit."""
    degrees = degrees_of(config.parallel)
    if degrees.problems():
        return  # said already, and the rest would divide by them
    for problem in architecture.problems(degrees):
        key = problem.partition("=")[0]

        def fits(value: int, key: str = key) -> bool:
            changes: dict[str, Any] = {key.removeprefix("parallel."): value}
            other = dataclasses.replace(degrees, **changes)
            return not other.problems() and not any(p.startswith(f"{key}=") for p in architecture.problems(other))

        faults.add(problem + _fitting(key, model, fits))
    for problem in training_problems(degrees, has_experts=architecture.experts is not None):
        faults.add(problem)


def _check_rollout_split(config: Config, architecture: Architecture, model: str, faults: Faults) -> None:
    """Adds why an engine cannot hold the model, with the degrees that can."""
    for problem in Workers(config.rollout.tp).problems(architecture):
        faults.add(problem + _fitting("rollout.tp", model, lambda tp: not Workers(tp).problems(architecture)))


def _fitting(key: str, model: str, fits: Callable[[int], bool]) -> str:
    found = [str(value) for value in range(1, 65) if fits(value)]
    return f" ({model}: {key}={_listed(found, 'or')})" if found else ""


def _check_cluster(config: Config, faults: Faults) -> None:
    cluster, rollout = config.cluster, config.rollout
    if cluster.nodes > 1 and faults.sound("cluster.nodes", "cluster.ray_address") and cluster.ray_address == "local":
        faults.add(
            f"cluster.nodes={cluster.nodes}: cluster.ray_address=local starts Ray on this machine only; start Ray on "
            "the nodes and give cluster.ray_address=host:port"
        )
    _check_sync(config, faults)
    in_file = rollout.sync == "gather" and faults.sound("rollout.sync", "rollout.sync_dir")
    if cluster.nodes > 1 and faults.sound("cluster.nodes") and in_file and _in_memory(rollout.sync_dir):
        faults.add(
            f"rollout.sync_dir={rollout.sync_dir}: the memory of one node, and cluster.nodes={cluster.nodes}; give a "
            "folder that all nodes share"
        )
    if cluster.platform != "cuda" or not faults.sound("cluster", "parallel"):
        return
    world, gpus = config.parallel.world, cluster.nodes * cluster.gpus_per_node
    if world > gpus:
        faults.add(
            f"parallel: tp {config.parallel.tp} x pp {config.parallel.pp} x dp {config.parallel.dp} = {world} ranks, "
            f"and cluster.nodes={cluster.nodes} x cluster.gpus_per_node={cluster.gpus_per_node} are {gpus} GPUs; lower "
            "tp, pp or dp, or add nodes"
        )
    if not faults.sound("rollout.tp", "rollout.engines"):
        return
    if rollout.tp > cluster.gpus_per_node:
        faults.add(
            f"rollout.tp={rollout.tp}: an engine stays on one node, which has cluster.gpus_per_node="
            f"{cluster.gpus_per_node}; lower rollout.tp"
        )
    wanted = f"rollout: engines {rollout.engines} x tp {rollout.tp} = {rollout.tp * rollout.engines} GPUs"
    if rollout.placement == "disaggregated":
        if world <= gpus < world + rollout.tp * rollout.engines:
            faults.add(
                f"{wanted} of their own beside the {world} of the training ranks, and cluster.nodes={cluster.nodes} x "
                f"cluster.gpus_per_node={cluster.gpus_per_node} are {gpus}; lower rollout.engines, rollout.tp or the "
                "parallel degrees, or add nodes"
            )
    elif rollout.tp * rollout.engines > world:
        faults.add(
            f"{wanted}, and engines share those of the {world} training ranks; lower rollout.engines or rollout.tp, or "
            "give them their own with rollout.placement=disaggregated"
        )


def _check_sync(config: Config, faults: Faults) -> None:
    """A transport must be of the platform, and reach from node to node if there are several."""
    sync, cluster = config.rollout.sync, config.cluster
    if sync not in SYNCS or not faults.sound("rollout.sync", "cluster.platform"):
        return
    platforms, one_node = SYNCS[sync]
    if cluster.platform not in ("auto", *platforms):
        others = [name for name, (served, _) in SYNCS.items() if cluster.platform in served]
        faults.add(
            f"rollout.sync={sync}: is for cluster.platform={_listed(list(platforms), 'or')}, and it is "
            f"{cluster.platform}; use {_listed(['auto', *others], 'or')}",
            "rollout.sync",
        )
    elif sync == "nccl" and config.rollout.placement == "colocated":
        faults.add(
            "rollout.sync=nccl: NCCL has one process on a GPU, and with rollout.placement=colocated rank and engine "
            "share each; use auto, or rollout.placement=disaggregated",
            "rollout.sync",
        )
    elif one_node and cluster.nodes > 1 and config.rollout.placement == "disaggregated":
        faults.add(
            f"rollout.sync={sync}: reads memory of its own node, and cluster.nodes={cluster.nodes} with "
            "rollout.placement=disaggregated; use auto",
            "rollout.sync",
        )


def _check_environment(config: Config, faults: Faults) -> None:
    """The keys that the chosen environment adds to the common ones: each field carries its rule."""
    env = config.env
    for item in dataclasses.fields(env):
        key, value = f"env.{item.name}", getattr(env, item.name)
        if not faults.sound(key):
            continue
        allowed, choices = item.metadata.get("range"), item.metadata.get("choices")
        if allowed is not None and not allowed.holds(value):
            faults.add(f"{key}={value}: must be a number, {allowed}", key)
        if choices is not None and value not in choices:
            faults.add(f"{key}={value}: there is no such choice; use {_listed(list(choices), 'or')}", key)
    for name, problem in env.problems():
        if faults.sound(f"env.{name}"):
            faults.add(problem, f"env.{name}")


def _check_lengths_of_training(config: Config, faults: Faults) -> None:
    warmup, iterations = config.critic.warmup_iterations, config.trainer.iterations
    sound = faults.sound("algo.estimator", "critic.warmup_iterations", "trainer.iterations")
    if sound and config.has_critic and warmup >= iterations:
        faults.add(
            f"critic.warmup_iterations={warmup}: the policy would learn in none of trainer.iterations={iterations}; "
            "use fewer"
        )
    sft = config.sft
    if faults.sound("sft.steps", "sft.warmup_steps") and sft.warmup_steps >= sft.steps:
        faults.add(f"sft.warmup_steps={sft.warmup_steps}: leaves none of sft.steps={sft.steps} at full lr; lower it")


def _check_machine(config: Config, faults: Faults, command: Command) -> None:
    """What must be true here and now, before `command` starts."""
    if command == "train":
        _check_run_dir(config, faults)
        _check_sync_dir(config, faults)
    else:
        _check_output(config, faults)
    is_made_anew = command == "sft" and config.model.path.startswith(BUILTIN)
    folder = local_folder(config.model.path) if faults.sound("model.path") and not is_made_anew else None
    if folder is not None and not any(folder.glob("*.safetensors")):
        faults.add(f"model.path={config.model.path}: {folder} has no *.safetensors file; export the weights again")


def _check_run_dir(config: Config, faults: Faults) -> None:
    run_dir = _expanded("trainer.run_dir", config.trainer.run_dir, faults)
    if run_dir is None:
        return
    if run_dir.exists() and not run_dir.is_dir():
        faults.add(f"trainer.run_dir={run_dir}: is a file; give a folder")
    elif holds_run(run_dir) and not config.trainer.resume:
        faults.add(already_holds_run(run_dir))


def _check_sync_dir(config: Config, faults: Faults) -> None:
    if config.rollout.sync != "gather":
        return
    sync_dir = _expanded("rollout.sync_dir", config.rollout.sync_dir, faults)
    if sync_dir is not None and not (sync_dir.is_dir() and os.access(sync_dir, os.W_OK)):
        faults.add(
            f"rollout.sync_dir={sync_dir}: is not a folder that can be written to; give one with room for the weights"
        )


def _check_output(config: Config, faults: Faults) -> None:
    output = _expanded("sft.output", config.sft.output, faults)
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        faults.add(f"sft.output={output}: exists and is not an empty folder; give another, or remove it first")


def _expanded(key: str, path: str, faults: Faults) -> Path | None:
    """The path that a key names; None if a fault of it is known, or was found now."""
    if not faults.sound(key):
        return None
    try:
        return expanded(path)
    except MegagentError as error:
        faults.add(f"{key}={path}: {error}", key)
        return None


def _in_memory(folder: str) -> bool:
    return folder == "/dev/shm" or folder.startswith("/dev/shm/")


def _listed(words: list[str], joint: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {joint} {words[-1]}"
