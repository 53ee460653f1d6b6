"""How long do advantages take? credit() on a large iteration, against the same formulas one row at a time.

    python -m benchmarks.advantages

65,536 rows: 1,024 tasks of 8 episodes of 8 steps, 13 response tokens a row on average. Timed are returns, rewards,
penalty and the estimator, from collected columns to one advantage a token. The row-by-row code is the straightforward
one over tensors and dictionaries, with a linear return loop. Best of several runs each.

Bars: gigpo under 0.3 s, and at least 20 times faster than row by row; both give the same numbers.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.report import arguments, close
from megagent.algos.credit import credit
from megagent.batch import Jagged, StepBatch, objects
from megagent.config import AlgoConfig

SECONDS = 0.3
TIMES = 20.0
ESTIMATORS = ("gigpo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "step_returns", "gae")


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    options = parser.parse_args()
    batch = iteration(tasks=32 if options.quick else 1024)
    algo = AlgoConfig()
    figures: dict[str, float] = {"rows": len(batch), "tokens": batch["response_mask"].tokens}
    slow_seconds, expected = best(lambda: row_by_row(batch, algo), runs=1)
    for estimator in ESTIMATORS:
        chosen = AlgoConfig(estimator=estimator)
        seconds, credited = best(lambda chosen=chosen: credit(batch, chosen), runs=5)
        figures[f"{estimator} seconds"] = seconds
        if estimator == "gigpo":
            worst = float((credited["advantages"].values - expected).abs().max())
    figures |= {
        "row by row seconds": slow_seconds,
        "times faster": slow_seconds / figures["gigpo seconds"],
        "largest difference": worst,
    }
    if not options.json:
        for name, value in figures.items():
            print(f"{name:32s} {value:,.4f}")
    bars = {
        "gigpo takes under 0.3 s": figures["gigpo seconds"] < SECONDS,
        "at least 20 times faster than row by row": figures["times faster"] >= TIMES,
        "the same numbers to 1e-4": worst < 1e-4,
    }
    return close("advantages", figures, bars)


def iteration(tasks: int, episodes: int = 8, steps: int = 8, pages: int = 12) -> StepBatch:
    """Collected rows with every column that credit() reads."""
    generator = torch.Generator().manual_seed(0)
    rows = tasks * episodes * steps
    task = torch.arange(rows) // (episodes * steps)
    traj = torch.arange(rows) // steps
    step = torch.arange(rows) % steps
    won = torch.rand(tasks * episodes, generator=generator) < 0.3
    rewards = torch.where((step == steps - 1) & won[traj], 10.0, 0.0)
    lengths = torch.randint(6, 21, (rows,), generator=generator)
    tokens = int(lengths.sum())
    page = torch.randint(0, pages, (rows,), generator=generator).tolist()
    return StepBatch(
        {
            "uid": objects(f"goal {n}" for n in task.tolist()),
            "traj_uid": objects(f"episode {n}" for n in traj.tolist()),
            "anchor_obs": objects(f"the page number {n} of the shop, with all its products" for n in page),
            "step_index": step,
            "rewards": rewards,
            "episode_rewards": torch.where(won, 10.0, 0.0)[traj],
            "is_action_valid": torch.rand(rows, generator=generator) < 0.9,
            "responses": Jagged(torch.ones(tokens, dtype=torch.int64), lengths),
            "response_mask": Jagged(torch.ones(tokens), lengths),
            "values": Jagged(torch.randn(tokens, generator=generator), lengths),
        }
    )


def best(work: Callable[[], StepBatch | Tensor], runs: int) -> tuple[float, StepBatch | Tensor]:
    """(seconds of the fastest run, what it gave)"""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def row_by_row(batch: StepBatch, algo: AlgoConfig) -> Tensor:
    """[tokens] float32: GiGPO's advantages by loops over rows, as one would first write them."""
    rows = range(len(batch))
    uid, traj, page = batch["uid"], batch["traj_uid"], batch["anchor_obs"]
    returns = torch.zeros(len(batch))
    running: dict[str, Tensor] = {}
    for i in reversed(rows):
        running[traj[i]] = batch["rewards"][i] + algo.gamma * running.get(traj[i], torch.tensor(0.0))
        returns[i] = running[traj[i]]
    scores = torch.zeros(len(batch))
    for i in rows:
        fine = 0.0 if batch["is_action_valid"][i] else algo.invalid_action_penalty
        token_rewards = torch.zeros(int(batch["response_mask"].lengths[i]))
        token_rewards[-1] = batch["episode_rewards"][i] - fine
        scores[i] = token_rewards.sum()
        returns[i] -= fine
    of_task, of_page = defaultdict(list), defaultdict(list)
    for i in rows:
        of_task[uid[i]].append(scores[i])
        of_page[uid[i], page[i]].append(returns[i])
    task_mean = {key: torch.mean(torch.tensor(group)) for key, group in of_task.items()}
    page_mean = {key: torch.mean(torch.tensor(group)) for key, group in of_page.items()}
    parts = []
    for i in rows:
        joint = scores[i] - task_mean[uid[i]] + algo.step_weight * (returns[i] - page_mean[uid[i], page[i]])
        parts.append(joint * batch["response_mask"].row(i))
    return torch.cat(parts)


if __name__ == "__main__":
    sys.exit(main())
