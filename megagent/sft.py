"""The warm start: a model learns from scripted, imperfect shoppers what replies look like and what often helps.

The same Megatron ranks as in `train.py`, with a supervised loss; what it writes is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megagent.cluster.placement import Placement
from megagent.cluster.ranks import RankGroup
from megagent.cluster.session import ray_session
from megagent.config import Config
from megagent.envs.base import build_world
from megagent.envs.webshop.world import WebShopWorld
from megagent.errors import ConfigError
from megagent.model_source import BUILTIN, model_folder
from megagent.observe.console import Console
from megagent.parallel import platform
from megagent.paths import expanded
from megagent.rollout.demonstrations import demonstration_texts, supervised_batches
from megagent.rollout.tiny_model import fresh_weights, train_tokenizer, write_model

LOSS_EVERY = 100  # optimizer steps between two printed losses


def main(config: Config) -> None:
    """Warm-start the model as `config.sft` says and write it to sft.output.

    A built-in model is made anew: tokenizer from the demonstrations' texts, random weights. Any other model.path is
    tuned from its own weights.
    """
    output = expanded(config.sft.output)
    world = build_world(config.env)
    if not isinstance(world, WebShopWorld):
        raise ConfigError([f"env.name={config.env.name}: there are scripted episodes of webshop only; use env=webshop"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".megagent-sft-", dir=output.parent)))
        is_new = config.model.path.startswith(BUILTIN)
        start = _new_model(config, world, work / "start") if is_new else model_folder(config.model.path)
        console = stack.enter_context(Console(config.sft.steps, enabled=config.logger.console))
        with console.phase("start"):
            stack.enter_context(ray_session(config))
            located = replace(config, model=replace(config.model, path=str(start)))
            ranks = RankGroup(located, Placement(config, platform.resolve(config.cluster.platform)), task="sft")
            stack.callback(ranks.close)
            ranks.wait_until_started()
        _learn(config, world, start, ranks, console)
        ranks.export_hf(work / "learnt")
        if is_new:
            _store_small(start, work / "learnt", work / "small")
        os.rename(work / ("small" if is_new else "learnt"), output)
        console.note(f"warm-started model: {output}")


def _learn(config: Config, world: WebShopWorld, start: Path, ranks: RankGroup, console: Console) -> None:
    tokenizer = AutoTokenizer.from_pretrained(start)
    with console.phase("warm start", config.sft.steps) as advance:
        for step, rows in enumerate(supervised_batches(config, world, tokenizer, config.trainer.seed), start=1):
            metrics = ranks.supervised_update(rows)
            advance(1)
            if step % LOSS_EVERY == 0 or step == config.sft.steps:
                console.note(f"step {step:5d}  loss {metrics['sft/loss']:.4f}  lr {metrics['sft/lr']:.2e}")


def _new_model(config: Config, world: WebShopWorld, folder: Path) -> Path:
    """An untrained tiny model with a tokenizer of the world's language."""
    tokenizer = train_tokenizer(demonstration_texts(config, world, config.trainer.seed))
    write_model(folder, tokenizer, fresh_weights(config.trainer.seed), torch.float32)
    return folder


def _store_small(start: Path, learnt: Path, small: Path) -> None:
    """The learnt model in bf16: half the bytes to ship, and what it loses is less than one step of training."""
    from tokenizers import Tokenizer

    weights = load_file(learnt / "model.safetensors")
    write_model(small, Tokenizer.from_file(str(start / "tokenizer.json")), weights, torch.bfloat16)
