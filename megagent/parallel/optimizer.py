"""Megatron's AdamW, distributed or not, and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megagent.config import Config
from megagent.parallel.model import Stage

Task = Literal["rl", "sft", "critic"]


@dataclass(frozen=True)
class Optimizer:
    """step() clips and updates the weights; advance() moves the learning rate along its schedule."""

    megatron: MegatronOptimizer
    schedule: OptimizerParamScheduler

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.megatron.param_groups[0]["lr"])

    def step(self) -> float:
        """One update from the gradients that the schedule has left. Returns the gradient norm before clipping.

        The norm may be NaN or infinite; the caller must look. Collective over all ranks.
        """
        _, grad_norm, _ = self.megatron.step()
        # Not distributed, the optimizer leaves each parameter's gradient where autograd would add the next to it, and
        # Megatron's hook then adds the sum to itself: from the second step on, gradients would be doubled.
        self.megatron.zero_grad()
        return float(grad_norm)

    def advance(self) -> None:
        """To be called after every unit of the schedule: an iteration in rl and critic, an optimizer step in sft."""
        self.schedule.step(1)


def build(config: Config, stage: Stage, task: Task) -> Optimizer:
    """AdamW over this rank's parameters; biases and norms are not decayed (Megatron's rule).

    task: rl takes the rate and decay of config.trainer, counted in iterations that it learns in, critic the same with a
    rate of its own;
    sft takes those of config.sft, to 0 by a cosine, counted in optimizer steps.
    """
    trainer = config.trainer
    lr = {"rl": trainer.lr, "critic": config.critic.lr, "sft": config.sft.lr}[task]
    megatron = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=0.0,
            weight_decay=trainer.weight_decay,
            adam_beta1=trainer.adam_beta1,
            adam_beta2=trainer.adam_beta2,
            clip_grad=trainer.clip_grad,
            bf16=stage.transformer.bf16,
            params_dtype=stage.transformer.params_dtype,
            use_distributed_optimizer=config.parallel.distributed_optimizer,
        ),
        stage.wrapped,
        use_gloo_process_groups=False,
    )
    _allocate_moments(megatron)
    warmup, length = (
        (config.sft.warmup_steps, config.sft.steps)
        if task == "sft"
        else (trainer.lr_warmup_iterations, trainer.iterations)
    )
    if task == "rl" and config.has_critic:
        length -= config.critic.warmup_iterations  # in which the policy, and so its rate, stands still
    length = max(length, warmup + 1)
    schedule = OptimizerParamScheduler(
        megatron,
        # Warm-up from one part to all parts, not from 0: the first step would learn nothing.
        init_lr=lr / (warmup + 1),
        max_lr=lr,
        min_lr=0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=length,
        lr_decay_style="cosine" if task == "sft" else trainer.lr_decay,
        start_wd=trainer.weight_decay,
        end_wd=trainer.weight_decay,
        wd_incr_steps=length,
        wd_incr_style="constant",
        # A resumed run may be longer than it was planned at first: what is configured now counts.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
    return Optimizer(megatron, schedule)


def _allocate_moments(megatron: MegatronOptimizer) -> None:
    """Give torch's Adam the state that it would make in its first step.

    Megatron's checkpoints read the step out of every parameter's state, and fail where there is none yet: saving before
    the first step, and loading. Apex and Transformer Engine keep the step elsewhere and are left alone.
    """
    for each in getattr(megatron, "chained_optimizers", [megatron]):
        adam = each.optimizer
        if not isinstance(adam, torch.optim.Adam):
            continue
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
