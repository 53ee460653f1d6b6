"""How much of an iteration's work is padding, and how unevenly is it dealt? Packed micro-batches against fixed ones.

    python -m benchmarks.schedule --dp 8 --token-budget 16384

The rows are the steps of scripted shoppers in the embedded shop under the recipe's prompt (history of 2 steps): 16
tasks, 8 episodes each, in the order in which they arrive. Baseline: micro-batches of as many rows as the longest row
lets into the budget, in arrival order, equal numbers of rows to every rank.

Before it, the row arithmetic of the recipe's example: micro-batches of 16, 16 and 8 rows on 2 ranks, 1,890 rows.

Bars: padding waste below 5% and imbalance of real tokens between ranks below 3%, over the whole iteration.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import Tensor

from benchmarks.report import arguments, close
from megagent.algos.packing import Packing, pack
from megagent.algos.schedule import ScheduleSizes, schedule_table
from megagent.config import Config

WASTE = 0.05
IMBALANCE = 0.03
HIDDEN = 3584  # of Qwen2.5-7B: where attention starts to cost


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--token-budget", type=int, default=16384, help="tokens of a micro-batch")
    options = parser.parse_args()
    tasks = 8 if options.quick else 16
    lengths = step_lengths(tasks, episodes=8)
    multiple = ScheduleSizes(dp=options.dp, pp=2, vpp=2).micro_batch_multiple

    start = time.perf_counter()
    packed = pack(lengths, options.dp, options.token_budget, multiple, quadratic_at=12 * HIDDEN)
    seconds = time.perf_counter() - start
    fixed = fixed_micro_batches(lengths, options.dp, options.token_budget)
    figures = {
        "rows": len(lengths),
        "tokens": int(lengths.sum()),
        "longest row": int(lengths.max()),
        "shortest row": int(lengths.min()),
        "micro-batches of a rank": packed.micro_batches,
        "pack seconds": seconds,
        **{
            f"{name} {figure}": value
            for name, packing in (("packed", packed), ("fixed", fixed))
            for figure, value in (("waste", packing.waste), ("imbalance", packing.imbalance))
        },
    }
    if not options.json:
        example = ScheduleSizes(dp=2, log_prob_rows=16, reference_rows=16, actor_rows=8)
        for row in schedule_table(example, 1890):
            print(f"{row.name:42s} {row.value:6,}  {row.how}")
        for name, value in figures.items():
            print(f"{name:28s} {value:,.4f}" if isinstance(value, float) else f"{name:28s} {value:,}")
    bars = {
        "padding waste below 5%": packed.waste < WASTE,
        "token imbalance between ranks below 3%": packed.imbalance < IMBALANCE,
    }
    return close("schedule", figures, bars)


def step_lengths(tasks: int, episodes: int, seed: int = 0) -> Tensor:
    """[rows] int64: tokens of prompt and response of every step, as the tiny model's tokenizer counts them."""
    from megagent.envs.webshop.shopper import Mistakes, Shopper
    from megagent.envs.webshop.world import build_webshop
    from megagent.model_source import load_tokenizer
    from megagent.rollout.demonstrations import reply
    from megagent.rollout.memory import History
    from megagent.rollout.prompts import PromptBuilder

    config = Config()
    tokenizer = load_tokenizer("builtin:webshop_tiny")
    world = build_webshop(config.env)
    builder = PromptBuilder(config.env, config.rollout, tokenizer)
    shopper = Shopper(world, Mistakes(), config.env.max_steps)
    rng = random.Random(seed)
    lengths = []
    for task in rng.sample(list(world.tasks("train")), tasks):
        for _ in range(episodes):
            for step in shopper.shop(task, rng).steps:
                history = History(config.env.history_length)
                for page, action in step.history:
                    history.add(page, action)
                prompt = builder.build(step.observation, history)
                lengths.append(len(prompt) + len(tokenizer.encode(reply(step.think, step.action))))
    return torch.tensor(lengths, dtype=torch.int64)


def fixed_micro_batches(lengths: Tensor, dp: int, token_budget: int) -> Packing:
    """Equally many rows for every rank, in arrival order, in micro-batches that fit whatever their rows are."""
    rows_each = max(token_budget // int(lengths.max()), 1)
    shares = torch.tensor_split(torch.arange(len(lengths)), dp)
    return Packing(tuple(tuple(torch.split(share, rows_each)) for share in shares), lengths)


if __name__ == "__main__":
    sys.exit(main())
