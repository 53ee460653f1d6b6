"""How much of an iteration's work is padding, and how unevenly is it dealt? Micro-batches by tokens against fixed ones.

    python -m benchmarks.schedule --dp 8 --token-budget 16384

The rows are the steps of scripted shoppers in the embedded shop under the recipe's prompt (history of 2 steps): 16
tasks, 8 episodes each, in the order in which they arrive. Baseline: micro-batches of as many rows as the longest row
lets into the budget, in arrival order, equal numbers of rows to every rank. Dealt are the whole iteration, as for
log-probs, and its mini-batches, as for an update, whose ranks meet at the end of each; rows padded and end to end.

Then the time of one update of the tiny model on one rank, over the same rows, in fixed micro-batches of 4 rows (of
similar lengths, as the trainer cuts them) and in micro-batches of as many tokens as 4 of the longest rows have. Both
take turns; the time is that of the CPU, which a busy machine hardly changes.

Before it all, the row arithmetic of the recipe's example: micro-batches of 16, 16 and 8 rows on 2 ranks, 1,890 rows.

Bars: padding waste below 5% and imbalance of real tokens between ranks below 3%, over the whole iteration, and over
the mini-batches with rows end to end.
"""

from __future__ import annotations

import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.report import arguments, close
from megagent.algos.packing import Packing, dp_imbalance, pack, padding_waste
from megagent.algos.schedule import ScheduleSizes, schedule_table
from megagent.algos.shares import mini_batches, token_shares
from megagent.batch import Jagged, StepBatch
from megagent.config import Config, TrainerConfig

WASTE = 0.05
IMBALANCE = 0.03
HIDDEN = 3584  # of Qwen2.5-7B: where attention starts to cost
MODEL = "builtin:webshop_tiny"


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--token-budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--mini-batch-rows", type=int, default=TrainerConfig().mini_batch_rows)
    options = parser.parse_args()
    rows = shop_steps(tasks=8 if options.quick else 16, episodes=8)
    lengths = rows["prompts"].lengths + rows["responses"].lengths
    multiple = ScheduleSizes(dp=options.dp, pp=2, vpp=2).micro_batch_multiple

    def packed(part: Tensor, end_to_end: bool = False) -> Packing:
        budget = options.token_budget
        return pack(lengths[part], options.dp, budget, multiple, quadratic_at=12 * HIDDEN, end_to_end=end_to_end)

    everything = torch.arange(len(lengths))
    parts = mini_batches(len(lengths), options.mini_batch_rows, TrainerConfig(), update=0)
    start = time.perf_counter()
    whole = packed(everything)
    seconds = time.perf_counter() - start
    ways = {
        "fixed": [fixed_micro_batches(lengths, options.dp, options.token_budget)],
        "by tokens": [whole],
        "mini-batches by tokens": [packed(part) for part in parts],
        "mini-batches by tokens, end to end": [packed(part, end_to_end=True) for part in parts],
    }
    figures: dict[str, float] = {
        "rows": len(lengths),
        "tokens": int(lengths.sum()),
        "longest row": int(lengths.max()),
        "shortest row": int(lengths.min()),
        "micro-batches of a rank": whole.micro_batches,
        "pack seconds": seconds,
    }
    for name, packings in ways.items():
        figures[f"{name}: waste"], figures[f"{name}: imbalance"] = waste(packings), imbalance(packings)
    figures |= update_seconds(rows.take(range(8 if options.quick else 32)), rounds=1 if options.quick else 3)
    if not options.json:
        example = ScheduleSizes(dp=2, log_prob_rows=16, reference_rows=16, actor_rows=8)
        for row in schedule_table(example, 1890):
            print(f"{row.name:42s} {row.value:6,}  {row.how}")
        for name, value in figures.items():
            print(f"{name:46s} {value:,.4f}" if isinstance(value, float) else f"{name:46s} {value:,}")
    bars = {}
    for name in ("by tokens", "mini-batches by tokens, end to end"):
        bars[f"{name}: padding waste below 5%"] = figures[f"{name}: waste"] < WASTE
        bars[f"{name}: token imbalance between ranks below 3%"] = figures[f"{name}: imbalance"] < IMBALANCE
    return close("schedule", figures, bars)


def waste(packings: Sequence[Packing]) -> float:
    tokens = sum(sum(packing.tokens()) for packing in packings)
    return padding_waste(tokens, sum(sum(packing.padded_tokens()) for packing in packings))


def imbalance(packings: Sequence[Packing]) -> float:
    """Of packings one after the other, at the end of each of which the ranks meet."""
    return dp_imbalance(torch.tensor([packing.tokens() for packing in packings]))


def shop_steps(tasks: int, episodes: int, seed: int = 0) -> StepBatch:
    """Prompts and responses of every step, in the tiny model's tokens."""
    from transformers.utils import logging

    from megagent.envs.webshop.config import WebShopConfig
    from megagent.envs.webshop.shopper import Mistakes, Shopper
    from megagent.envs.webshop.world import build_webshop
    from megagent.model_source import load_tokenizer
    from megagent.rollout.demonstrations import reply
    from megagent.rollout.memory import History
    from megagent.rollout.prompts import PromptBuilder

    logging.set_verbosity_error()  # the recipe's prompts are longer than what the tiny model was made for
    env = WebShopConfig()
    config = Config(env=env)
    tokenizer = load_tokenizer(MODEL)
    world = build_webshop(env)
    builder = PromptBuilder(env, config.rollout, tokenizer)
    shopper = Shopper(world, Mistakes(), env.max_steps)
    rng = random.Random(seed)

    def steps() -> Iterator[tuple[Tensor, Tensor]]:
        for task in rng.sample(list(world.tasks("train")), tasks):
            for _ in range(episodes):
                for step in shopper.shop(task, rng).steps:
                    history = History(env.history_length)
                    for page, action in step.history:
                        history.add(page, action)
                    prompt = builder.build(step.observation, history)
                    response = tokenizer.encode(reply(step.think, step.action))
                    yield torch.tensor(prompt), torch.tensor(response)

    prompts, responses = zip(*steps(), strict=True)
    return StepBatch({"prompts": Jagged.from_list(prompts), "responses": Jagged.from_list(responses)})


def fixed_micro_batches(lengths: Tensor, dp: int, token_budget: int) -> Packing:
    """Equally many rows for every rank, in arrival order, in micro-batches that fit whatever their rows are."""
    rows_each = max(token_budget // int(lengths.max()), 1)
    shares = torch.tensor_split(torch.arange(len(lengths)), dp)
    return Packing(tuple(tuple(torch.split(share, rows_each)) for share in shares), lengths)


def update_seconds(rows: StepBatch, rounds: int, micro_batch_rows: int = 4) -> dict[str, float]:
    """CPU seconds of one update over the rows, one mini-batch, on one rank: the median of some rounds each."""
    from megagent.model_source import model_folder
    from megagent.parallel.rank import Rank

    responses = rows["responses"]
    noise = torch.randn(responses.tokens, generator=torch.Generator().manual_seed(0))
    ready = rows.with_columns(
        response_mask=responses.like(torch.ones(responses.tokens)),
        old_log_probs=responses.like(0.1 * noise - 1.0),
        ref_log_probs=responses.like(0.1 * noise - 1.0),
        advantages=responses.like(noise),
    )
    lengths = rows["prompts"].lengths + responses.lengths
    config = Config()
    config.model.path, config.model.dtype = str(model_folder(MODEL)), "fp32"
    config.cluster.platform, config.cluster.threads = "cpu", 1
    config.trainer.mini_batch_rows, config.trainer.micro_batch_rows = len(rows), micro_batch_rows
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = Rank(config, 0, 1, "127.0.0.1", port)
    rank.setup()

    def fixed() -> dict[str, float]:
        config.trainer.micro_batch_tokens = 0
        return rank.update(ready)

    def by_tokens() -> dict[str, float]:
        config.trainer.micro_batch_tokens = micro_batch_rows * int(lengths.max())
        [share] = token_shares(lengths, config, rank.policy.stage.architecture.hidden, update=0)
        return rank.update(share.of(ready), share.steps)

    ways = {"fixed": fixed, "by tokens": by_tokens}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    figures = {f"update, {name}: waste": way()["schedule/padding_waste"] for name, way in ways.items()}  # and warm up
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(cpu_seconds(way))
    rank.close()
    return figures | {f"update, {name}: seconds": statistics.median(each) for name, each in taken.items()}


def cpu_seconds(do: Callable[[], object]) -> float:
    start = time.process_time()
    do()
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
