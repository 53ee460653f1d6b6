"""Demonstrations for the warm start: scripted, imperfect shopping trips as rows for supervised training.

A script that knows the goal plays tasks of the warm-up panel and makes mistakes on purpose, so that the model learns
what replies look like and what usually helps, and leaves reinforcement learning something to improve. Each thought
restates, in the task's own words, what the step is for: it is what lets a tiny model copy the right value.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megagent.batch import Jagged, StepBatch
from megagent.config import Config
from megagent.envs.base import Observation
from megagent.envs.webshop.shopper import Mistakes, ShopperStep, demonstrations
from megagent.envs.webshop.world import WebShopWorld
from megagent.rollout.memory import History
from megagent.rollout.prompts import PromptBuilder, prompt_style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# In this share of the episodes the products swap ids. Where every id always means the same product, a model learns by
# heart which one answers which wish, and fails on wishes that it has not seen; swapped, it has to read the page.
SWAPPED = 0.5


@dataclass(frozen=True)
class Lesson:
    """One scripted step: what was seen and remembered, and the reply to learn."""

    observation: Observation
    history: History
    reply: str


def reply(thought: str, action: str) -> str:
    """The text that the projection reads back as `action`."""
    return f"<think>{thought}</think><action>{action}</action>"


def lessons(config: Config, world: WebShopWorld, seed: int) -> list[Lesson]:
    """The steps of sft.episodes scripted episodes over the warm-up panel, in order; the same seed gives the same."""
    made = []
    rng = random.Random(seed)
    mistakes = Mistakes()
    tasks = world.tasks("warmup")
    ids = [product.asin for product in world.shop.products]
    for episode in demonstrations(world, tasks, config.sft.episodes, mistakes, config.env.max_steps, seed):
        swaps = rng.random() < SWAPPED
        names = dict(zip(ids, rng.sample(ids, len(ids)), strict=True)) if swaps else {}
        for step in episode.steps:
            made.append(_lesson(step, config.env.history_length, names))
    return made


def _lesson(step: ShopperStep, history_length: int, names: Mapping[str, str]) -> Lesson:
    """The step with every product id replaced by the one in `names`, if it is there."""

    def renamed(text: str) -> str:
        swap = re.sub(r"\b[A-Z0-9]+\b", lambda found: names.get(found[0], found[0]), text)
        return re.sub(r"(?<=click\[)[a-z0-9]+(?=\])", lambda found: names.get(found[0].upper(), found[0]).lower(), swap)

    seen = step.observation
    history = History(history_length)
    for page, action in step.history:
        history.add(renamed(page), renamed(action))
    observation = Observation(seen.task, renamed(seen.page), tuple(renamed(action) for action in seen.admissible))
    return Lesson(observation, history, reply(step.think, renamed(step.action)))


def demonstration_texts(config: Config, world: WebShopWorld, seed: int) -> list[str]:
    """Every prompt and reply of the demonstrations: what a tokenizer of the world's language learns from."""
    style = prompt_style(config.env)
    return [
        text
        for lesson in lessons(config, world, seed)
        for text in (style(lesson.observation, lesson.history), lesson.reply)
    ]


def supervised_rows(
    made: Sequence[Lesson],
    builder: PromptBuilder,
    tokenizer: PreTrainedTokenizerBase,
    prompt_weight: float,
    with_history: bool,
) -> StepBatch:
    """One row per lesson, with the columns prompts, responses and loss_weights (Jagged).

    responses end with the tokenizer's end-of-text token. loss_weights: float32 over prompt and response tokens,
    `prompt_weight` on the prompt's and 1 on the response's. Raises MegagentError where the builder does.
    """
    prompts, responses, weights = [], [], []
    for lesson in made:
        history = lesson.history if with_history else History(0)
        prompt = builder.build(lesson.observation, history)
        response = [*tokenizer.encode(lesson.reply, add_special_tokens=False), int(tokenizer.eos_token_id)]
        prompts.append(torch.tensor(prompt, dtype=torch.int64))
        responses.append(torch.tensor(response, dtype=torch.int64))
        weights.append(torch.tensor([prompt_weight] * len(prompt) + [1.0] * len(response)))
    return StepBatch(
        {
            "prompts": Jagged.from_list(prompts),
            "responses": Jagged.from_list(responses),
            "loss_weights": Jagged.from_list(weights),
        }
    )


def supervised_batches(
    config: Config, world: WebShopWorld, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Iterator[StepBatch]:
    """The sft.steps batches of sft.batch_rows rows that warm-start a model, the same for the same seed.

    The first sft.short_prompt_fraction of them show prompts without history: shorter, and copying from the page is
    learnt sooner. Rows are drawn without replacement until all are used.
    """
    made = lessons(config, world, seed)
    builder = PromptBuilder(config.env, config.rollout, tokenizer)
    short = round(config.sft.steps * config.sft.short_prompt_fraction)
    rng = random.Random(seed)
    for with_history, steps in ((False, short), (True, config.sft.steps - short)):
        if not steps:
            continue
        rows = supervised_rows(made, builder, tokenizer, config.sft.prompt_weight, with_history)
        order: list[int] = []
        for _ in range(steps):
            while len(order) < config.sft.batch_rows:
                order = [*rng.sample(range(len(rows)), len(rows)), *order]
            order, drawn = order[: -config.sft.batch_rows], order[-config.sft.batch_rows :]
            yield rows.take(drawn)
