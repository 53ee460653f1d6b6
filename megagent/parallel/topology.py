"""Which rank is which: torch.distributed, Megatron's groups of ranks, and the seeds.

A process may hold one topology at a time; `Topology.destroy()` makes room for another.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megagent.config import Config
from megagent.errors import ConfigError
from megagent.parallel import platform
from megagent.parallel.degrees import Degrees, Place, degrees_of


@dataclass(frozen=True)
class Topology:
    """This process' place among the ranks."""

    degrees: Degrees
    place: Place

    @property
    def dp(self) -> int:
        return self.degrees.dp

    @property
    def dp_rank(self) -> int:
        return self.place.dp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.place.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.place.pp_rank == self.degrees.pp - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank returns the per-row results of its data-parallel replica."""
        return self.is_last_stage and self.place.tp_rank == 0

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    def sum_over_replicas(self, values: Sequence[float] | Tensor) -> Tensor:
        """[n] float64: the sums over the data-parallel replicas. Collective over them."""
        # NCCL and Gloo both reduce float64; counts of tokens and sums of millions of terms stay exact in it.
        total = torch.as_tensor(values, dtype=torch.float64).to(platform.current().device, copy=True)
        if self.degrees.dp > 1:
            dist.all_reduce(total, group=self.dp_group)
        return total.cpu()

    def from_last_stage(self, values: Tensor) -> Tensor:
        """[n] float64: the values of the last pipeline stage, on every stage. Collective over the stages."""
        if self.degrees.pp == 1:
            return values
        values = values.to(platform.current().device, dtype=torch.float64)
        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=self.pp_group)
        return values.cpu()

    def destroy(self) -> None:
        """Leave all process groups. Not collective: a peer may be gone already."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def initialise(config: Config, rank: int, world: int, master: str, port: int) -> Topology:
    """Join the other ranks. Collective; each wait in it and in later collectives ends after cluster.timeout_s.

    Raises ConfigError if tp x pp x dp is not `world`, or the degrees contradict each other.
    """
    sizes = degrees_of(config.parallel)
    if problems := sizes.problems():
        raise ConfigError(problems)
    if sizes.world != world:
        needed = f"tp={sizes.tp} x pp={sizes.pp} x dp={sizes.dp} needs {sizes.world} ranks"
        raise ConfigError([f"parallel: {needed} but {world} were started; start as many as the product"])
    platform.prepare_group_environment(master)
    dist.init_process_group(
        backend=platform.current().backend,
        init_method=f"tcp://{master}:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=config.cluster.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        distributed_timeout_minutes=config.cluster.timeout_s / 60,
        # Extra Gloo groups serve checkpoint formats that are not used here.
        create_gloo_process_groups=False,
    )
    seed_everything(config.trainer.seed)
    return Topology(sizes, sizes.place(rank))


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's trackers; pipeline stages and tensor ranks get streams of their own."""
    seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
