"""RMSNorm for the layer spec without Transformer Engine, fit for sequence parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megagent.parallel import platform

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class TorchNorm(torch.nn.RMSNorm):
    """Takes the place of Megatron's own torch norm, which refuses sequence parallelism.

    There each rank sees other tokens, so the weight's gradients are to be added up over the tensor-parallel ranks.
    Megatron does so for parameters that carry the mark `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """As Megatron calls it."""
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden size]. Returns the same shape and dtype."""
        if platform.current().is_cuda or x.dtype != torch.float32:
            return super().forward(x)
        return RmsNorm.apply(x, self.weight, self.eps)


class RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight with its gradients, in a third of the passes over memory that torch makes on CPUs.

    Tensor-parallel ranks all compute their norms whole: what is saved here is saved on each of them.
    With r = 1 / rms(x), h the hidden size, g the gradient of the result and <,> the sum over a token's elements:
        d / d x      = r (g weight - x r^2 <g x, weight> / h)
        d / d weight = sum over tokens of r g x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        product = grad * x
        share = (product @ weight)[..., None] * r.square().div_(-x.shape[-1])
        grad_weight = product.mul_(r).flatten(0, -2).sum(dim=0)
        return torch.mul(grad, weight, out=product).addcmul_(x, share).mul_(r), grad_weight, None
