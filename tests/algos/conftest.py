"""Small batches for the algorithm tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings

from megagent.batch import Jagged, StepBatch, objects

settings.register_profile("fast", max_examples=15, deadline=None, derandomize=True)
settings.load_profile("fast")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., StepBatch]:
    """A factory of collected rows: every column that credit() and align() read, random but fixed by the seed."""

    def make(seed: int = 0, tasks: int = 3, episodes: int = 4, max_steps: int = 5, pages: int = 3) -> StepBatch:
        rng = np.random.default_rng(seed)
        rows: list[dict[str, object]] = []
        for task in range(tasks):
            for episode in range(episodes):
                steps = int(rng.integers(1, max_steps + 1))
                rewards = rng.choice([0.0, 0.0, 10.0, 1.5], size=steps)
                for step in range(steps):
                    rows.append(
                        {
                            "uid": f"task {task}",
                            "traj": f"episode {task}.{episode}",
                            "anchor": f"page {rng.integers(pages)}",
                            "step": step,
                            "reward": rewards[step],
                            "episode_reward": rewards.sum(),
                            "valid": bool(rng.random() < 0.7),
                        }
                    )
        lengths = [int(n) for n in rng.integers(1, 5, size=len(rows))]
        masks = [torch.tensor(rng.integers(0, 2, size=n), dtype=torch.float32) for n in lengths]
        responses = [torch.tensor(rng.integers(1, 99, size=n)) for n in lengths]
        prompts = [torch.tensor(rng.integers(1, 99, size=n)) for n in rng.integers(1, 6, size=len(rows))]
        mask = Jagged.from_list(masks, dtype=torch.float32)
        return StepBatch(
            {
                "uid": objects(row["uid"] for row in rows),
                "traj_uid": objects(row["traj"] for row in rows),
                "anchor_obs": objects(row["anchor"] for row in rows),
                "step_index": torch.tensor([row["step"] for row in rows], dtype=torch.int64),
                "rewards": torch.tensor([row["reward"] for row in rows], dtype=torch.float32),
                "episode_rewards": torch.tensor([row["episode_reward"] for row in rows], dtype=torch.float32),
                "is_action_valid": torch.tensor([row["valid"] for row in rows], dtype=torch.bool),
                "prompts": Jagged.from_list(prompts, dtype=torch.int64),
                "responses": Jagged.from_list(responses, dtype=torch.int64),
                "response_mask": mask,
                "rollout_log_probs": mask.like(torch.randn(mask.tokens, generator=torch.Generator().manual_seed(seed))),
            }
        )

    return make


@pytest.fixture(scope="session")
def scored_batch() -> Callable[..., StepBatch]:
    """A factory of rows with one response token each, from their scores, tasks, anchors and returns."""

    def make(
        scores: Sequence[float],
        uid: Sequence[str],
        anchors: Sequence[str] | None = None,
        returns: Sequence[float] | None = None,
    ) -> StepBatch:
        one = torch.ones(len(scores), dtype=torch.int64)
        return StepBatch(
            {
                "uid": objects(uid),
                "traj_uid": objects(f"episode {i}" for i in range(len(scores))),
                "anchor_obs": objects(anchors or ["page"] * len(scores)),
                "prompts": Jagged(one.clone(), one),
                "responses": Jagged(one.clone(), one),
                "response_mask": Jagged(one.to(torch.float32), one),
                "token_rewards": Jagged(torch.tensor(scores, dtype=torch.float32), one),
                "returns": torch.tensor(returns or [0.0] * len(scores), dtype=torch.float32),
            }
        )

    return make
