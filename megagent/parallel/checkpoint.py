"""Checkpoints of a training run: weights, optimizer, schedule and counters, by Megatron's dist_checkpointing.

    <folder>/iteration_0000012/          complete, or it would not have this name
    <folder>/iteration_0000012/critic/   the critic's, if there is one
    <folder>/latest                      the name of the newest complete one

A checkpoint is written beside and renamed when complete. It does not depend on tp, pp, vpp and dp: the optimizer's
state is stored by parameter, and any other topology may load it. What it does depend on is checked before loading.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megagent.errors import MegagentError
from megagent.parallel.critic import Critic
from megagent.parallel.learner import Learner
from megagent.parallel.policy import Policy
from megagent.parallel.unpickling import weights_only

# What Megatron 0.16 and 0.19 and torch raise for files that are damaged, cut short or not there.
_UNREADABLE = (CheckpointingException, CheckpointException, OSError, KeyError, EOFError, UnpicklingError)
_LATEST = "latest"
_CRITIC = "critic"
# Stored parameter by parameter in full shapes, so that every topology can read it.
_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}


def save(policy: Policy, folder: Path, iteration: int, critic: Critic | None = None) -> Path:
    """Write the state after `iteration` under `folder`; collective. Returns the checkpoint's own folder.

    The critic's is a checkpoint inside the policy's. One of the same iteration is replaced. Until the last moment
    `latest` names the checkpoint before.
    """
    final = folder / f"iteration_{iteration:07d}"
    beside = folder / f".{final.name}.partial"
    writes = dist.get_rank() == 0
    if writes:
        shutil.rmtree(beside, ignore_errors=True)
        for _, part in _parts(policy, critic, beside):
            part.mkdir(parents=True)
    dist.barrier()
    for learner, part in _parts(policy, critic, beside):
        state = {**_sharded(learner, loading=False), "iteration": iteration, "layout": _layout(learner)}
        dist_checkpointing.save(state, str(part), content_metadata=dict(_CONTENT))
    dist.barrier()
    if writes:
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        pointer = folder / f".{_LATEST}.partial"
        pointer.write_text(final.name + "\n", encoding="utf-8")
        os.replace(pointer, folder / _LATEST)
    dist.barrier()
    return final


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, None if there is none."""
    pointer = folder / _LATEST
    if not pointer.is_file():
        return None
    return folder / pointer.read_text(encoding="utf-8").strip()


def load(policy: Policy, folder: Path, critic: Critic | None = None) -> int:
    """Restore the newest checkpoint under `folder`; collective. Returns the iteration after which it was written.

    The reference policy stays that of config.model.path. Raises MegagentError if there is none or it cannot be read;
    the rank's weights are undefined then.
    """
    source = latest(folder)
    if source is None:
        raise MegagentError(f"{folder}: there is no checkpoint (no file {_LATEST}); start without trainer.resume")
    _check_layout(policy, source)
    if critic is not None and not (source / _CRITIC).is_dir():
        raise MegagentError(f"{source} has no critic; resume with the algo.estimator that the run had")
    policy.reference.keep()
    for learner, part in _parts(policy, critic, source):
        try:
            with weights_only():
                state = dist_checkpointing.load(_sharded(learner, loading=True), str(part))
        except _UNREADABLE as error:
            raise MegagentError(
                f"{part} cannot be loaded ({_first_line(error)}); name an older checkpoint in {folder / _LATEST}"
            ) from error
        for name, chunk in _named_chunks(learner).items():
            chunk.load_state_dict(state["model"][name])
        learner.optimizer.megatron.load_state_dict(state["optimizer"])
        learner.optimizer.schedule.load_state_dict(state["schedule"])
        learner.updates = int(state["updates"])
    return int(state["iteration"])


def _parts(policy: Policy, critic: Critic | None, folder: Path) -> list[tuple[Learner, Path]]:
    return [(policy, folder), *([(critic, folder / _CRITIC)] if critic is not None else [])]


def _sharded(learner: Learner, loading: bool) -> dict[str, Any]:
    """What a checkpoint holds, as Megatron's sharded state: where each rank's tensors lie in the full ones."""
    # Copies: Megatron adds a process group to the metadata, and another topology must not find it there.
    model = {name: chunk.sharded_state_dict(metadata=dict(_CONTENT)) for name, chunk in _named_chunks(learner).items()}
    return {
        "model": model,
        "optimizer": learner.optimizer.megatron.sharded_state_dict(model, is_loading=loading, metadata=dict(_CONTENT)),
        "schedule": learner.optimizer.schedule.state_dict(),
        "updates": learner.updates,
    }


def _named_chunks(learner: Learner) -> dict[str, Any]:
    """The model's chunks on this rank. Tensors are stored by their own names and places, whatever chunk has them."""
    return {f"chunk{number}": chunk for number, chunk in enumerate(learner.stage.chunks)}


def _layout(learner: Learner) -> dict[str, Any]:
    """What a checkpoint's content depends on, by the key of the configuration."""
    parallel = learner.config.parallel
    layout: dict[str, Any] = {"parallel.distributed_optimizer": parallel.distributed_optimizer}
    if learner.stage.transformer.num_moe_experts:
        # Megatron keeps the experts' optimizer state under other names where they are split over ranks.
        layout["parallel.ep above 1"] = parallel.ep > 1
    return layout


def _check_layout(policy: Policy, source: Path) -> None:
    """Raises MegagentError if the checkpoint's content is not what this run's configuration makes of it."""
    try:
        with weights_only():
            stored = dist_checkpointing.load_common_state_dict(str(source)).get("layout", {})
    except _UNREADABLE:
        return  # said better by what comes next
    differing = [
        f"{key} was {_yes_no(stored[key])} and is {_yes_no(value)}"
        for key, value in _layout(policy).items()
        if stored.get(key, value) != value
    ]
    if differing:
        raise MegagentError(f"{source} cannot be resumed like this: {'; '.join(differing)}; set it as it was")


def _yes_no(value: bool) -> str:
    return "true" if value else "false"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
