"""The critic: values and updates against plain torch, on every cut of the model, and its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagent.batch import StepBatch
from megagent.config import Config
from tests.parallel import jobs, plain
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow

LAYOUTS: list[jobs.Layout] = [{}, {"tp": 2, "pp": 2, "vpp": 2}, {"tp": 2, "dp": 2, "sequence_parallel": True}]


def critic_config(model: Path, layout: jobs.Layout) -> Config:
    config = jobs.laid_out(model, layout, lr_warmup_iterations=1, iterations=4)
    config.algo.estimator, config.critic.lr, config.critic.clip = "gae", 2e-2, 0.3
    return config


def critic_rows() -> StepBatch:
    """Targets of the size of a return, and old values that some updates leave behind."""
    rows = jobs.make_rows()
    noise = torch.randn(2, rows["responses"].tokens, generator=torch.Generator().manual_seed(5))
    like = rows["responses"].like
    return rows.with_columns(values=like(0.1 * noise[0]), value_targets=like(3 + 2 * noise[1]))


def critic_job(start: jobs.Start, config: Config, rows: StepBatch, folder: str | None) -> dict[str, Any]:
    """Values at first and after each of two updates, and the same from a checkpoint between the two."""
    rank = start(config)
    part = jobs.replica_part(rank, rows)

    def values() -> Tensor | None:
        found = rank.values(part)
        return None if found is None else found.values

    seen, metrics = [values()], []
    for update in range(2):
        metrics.append(rank.update_critic(part))
        seen.append(values())
        if update == 0 and folder is not None:
            rank.save(folder, 1)
    actor_moved = rank.policy.steps
    resumed = None
    if folder is not None:
        rank = start(config)
        rank.load(folder)
        again = rank.update_critic(part)
        last = values()
        resumed = again == metrics[1] and (last is None or torch.equal(last, seen[2]))
    return {
        "values": seen,
        "metrics": metrics,
        "replica": rank.topology.dp_rank,
        "speaks": rank.topology.speaks,
        "resumed": resumed,
        "actor_steps": actor_moved,
    }


class PlainCritic(torch.nn.Module):
    """transformers' hidden states and a linear head, one row at a time."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.body = plain.load(model).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, rows: StepBatch) -> Tensor:
        found = []
        for prompt, response in zip(rows["prompts"].rows(), rows["responses"].rows(), strict=True):
            hidden = self.body(torch.cat([prompt, response])[None]).last_hidden_state[0, :-1]
            found.append(self.head(hidden[len(prompt) - 1 :])[:, 0])
        return torch.cat(found)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, Any]:
    """Two updates of plain torch: values before and after each, and the loss of each."""
    config, rows = critic_config(tiny_model, {}), critic_rows()
    model = PlainCritic(tiny_model)
    optimizer = plain.adamw(model, config, config.critic.lr)
    mask = rows["response_mask"].values
    old, targets = rows["values"].values, rows["value_targets"].values
    seen, losses = [], []
    for rate in (0.5, 1.0):  # one iteration of warm-up
        for group in optimizer.param_groups:
            group["lr"] = config.critic.lr * rate
        values = model(rows)
        held = old + (values - old).clamp(-0.3, 0.3)
        loss = (0.5 * torch.maximum((values - targets) ** 2, (held - targets) ** 2) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip_grad)
        optimizer.step()
        seen.append(values.detach())
        losses.append(loss.item())
    with torch.no_grad():
        seen.append(model(rows))
    return {"values": seen, "losses": losses}


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def trained(
    request: pytest.FixtureRequest, ranks: RankPool, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    layout: jobs.Layout = request.param
    folder = None if "dp" in layout else str(tmp_path_factory.mktemp("critic"))
    config = critic_config(tiny_model, layout)
    return ranks.run(critic_job, jobs.ranks_of(layout), config=config, rows=critic_rows(), folder=folder)


def test_values_and_updates_are_those_of_plain_torch(trained: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    speaking = sorted((result for result in trained if result["speaks"]), key=lambda result: result["replica"])
    for step, plain_values in enumerate(expected["values"]):
        mine = torch.cat([result["values"][step] for result in speaking])
        torch.testing.assert_close(mine, plain_values, rtol=1e-3, atol=1e-3)
    for result in trained:
        assert [each["critic/vf_loss"] for each in result["metrics"]] == pytest.approx(expected["losses"], rel=1e-3)
        assert [each["critic/lr"] for each in result["metrics"]] == pytest.approx([1e-2, 2e-2])


def test_the_critic_learns_from_a_checkpoint_as_without_and_the_actor_stays(trained: list[dict[str, Any]]) -> None:
    assert all(result["resumed"] in (True, None) for result in trained)
    assert all(result["actor_steps"] == 0 for result in trained)
