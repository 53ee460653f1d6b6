"""The norm of the layer spec without Transformer Engine, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megagent.parallel.norm import RmsNorm


@pytest.mark.parametrize("shape", [(1, 1, 8), (7, 3, 48), (5, 2, 4, 16)], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_values_and_gradients_are_those_of_torch_in_double(shape: tuple[int, ...], scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator) + 1
    x = (x * scale).requires_grad_()
    weight.requires_grad_()
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = functional.rms_norm(exact_x, shape[-1:], exact_weight, 1e-6)
    expected.backward(grad.double())
    found = RmsNorm.apply(x, weight, 1e-6)
    found.backward(grad)
    for mine, theirs in ((found, expected), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        largest = float(theirs.detach().abs().max())
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=1e-6 * largest)


def test_heads_that_are_a_view_of_a_larger_tensor_are_no_special_case() -> None:
    both = torch.randn(5, 2, 3, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    found = RmsNorm.apply(both[..., :8], weight, 1e-6)
    found.sum().backward()
    torch.testing.assert_close(found, functional.rms_norm(both[..., :8], (8,), weight, 1e-6))
    assert both.grad is not None
    assert bool(both.grad[..., :8].any())
    assert not both.grad[..., 8:].any()
