"""The critic's loss, by hand and against what must not matter."""

from __future__ import annotations

import math

import pytest
import torch

from megagent.algos.values import clipped_value_loss, explained_variance, value_loss
from megagent.batch import Jagged, StepBatch


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"),
    [
        (1.0, 8.0, -4.0, False),  # has not moved yet: half of (1 - 5) squared
        (1.4, 6.48, -3.6, False),  # moved by less than the clip
        (3.0, 6.125, 0.0, True),  # moved further towards the target: counts as 1.5, and is not pulled on
        (-1.0, 18.0, -6.0, False),  # moved away from it: pulled back with full strength
    ],
)
def test_by_hand(value: float, loss: float, gradient: float, clipped: bool) -> None:
    values = torch.tensor([value], requires_grad=True)
    result, held = clipped_value_loss(values, torch.tensor([1.0]), torch.tensor([5.0]), clip=0.5)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)
    assert held.item() is clipped


def _columns(tokens: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "values": torch.randn(tokens, generator=generator),
        "value_targets": 3 * torch.randn(tokens, generator=generator),
        "response_mask": (torch.rand(tokens, generator=generator) > 0.3).float(),
    }


def test_parts_add_up_to_the_whole() -> None:
    columns = _columns()
    values = torch.linspace(-1, 1, 12)
    count = float(columns["response_mask"].sum())
    whole, sums = value_loss(values, columns, 0.2, count)
    parts = [
        value_loss(values[part], {name: column[part] for name, column in columns.items()}, 0.2, count)
        for part in (slice(0, 5), slice(5, 6), slice(6, 12))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-6)
    for name, total in sums.items():
        assert sum(part[name].item() for _, part in parts) == pytest.approx(total.item(), rel=1e-6)


def test_masked_tokens_may_hold_anything() -> None:
    columns = _columns()
    expected, _ = value_loss(torch.zeros(12), columns, 0.2, 8.0)
    masked = columns["response_mask"] == 0
    columns["value_targets"][masked] = float("nan")
    values = torch.zeros(12)
    values[masked] = float("inf")
    values.requires_grad_()
    loss, _ = value_loss(values, columns, 0.2, 8.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item())
    assert values.grad is not None
    assert values.grad.isfinite().all()


def _batch(values: list[float], targets: list[float]) -> StepBatch:
    tokens = Jagged(torch.tensor(values), torch.tensor([2, len(values) - 2]))
    mask = tokens.like(torch.tensor([0.0] + [1.0] * (len(values) - 1)))
    return StepBatch({"values": tokens, "value_targets": tokens.like(torch.tensor(targets)), "response_mask": mask})


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    targets = [99.0, 1.0, 2.0, 6.0]  # the first token carries no loss
    assert explained_variance(_batch([0.0, 1.0, 2.0, 6.0], targets)) == pytest.approx(1.0)
    assert explained_variance(_batch([0.0, 7.0, 7.0, 7.0], targets)) == pytest.approx(0.0)
    assert math.isnan(explained_variance(_batch([0.0, 1.0, 2.0, 6.0], [4.0] * 4)))
