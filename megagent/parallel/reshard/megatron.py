"""The layout of Megatron ranks: tensor, pipeline (uneven, interleaved), expert, expert-tensor and data parallel.

Every data-parallel replica holds the same, so a plan reads from all of them in turns. Tensors bear their canonical
names, with the global numbers of layers and experts: no two of a rank's chunks have a tensor of one name.
"""

from __future__ import annotations

from dataclasses import replace

from megagent.parallel.degrees import Degrees, Place
from megagent.parallel.models.architecture import Architecture
from megagent.parallel.reshard.boxes import LocalTensor
from megagent.parallel.reshard.layout import Layout


def layout(architecture: Architecture, degrees: Degrees, dtype: str = "BF16") -> Layout:
    """What all ranks hold. Raises ConfigError if these degrees cannot hold the model."""
    architecture.require(degrees)
    # The same tensors as a replica's others: made once.
    made: dict[tuple[int, int, int, int], tuple[LocalTensor, ...]] = {}
    tensors = {}
    for place in degrees.places():
        key = (place.tp_rank, place.pp_rank, place.ep_rank, place.etp_rank)
        if key not in made:
            made[key] = rank_tensors(architecture, degrees, place, dtype)
        tensors[place.rank] = made[key]
    sizes = {"tp": degrees.tp, "pp": degrees.pp, "vpp": degrees.vpp, "ep": degrees.ep, "dp": degrees.dp}
    named = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name in ("tp", "pp"))
    return Layout(f"Megatron {named}", tensors)


def rank_tensors(
    architecture: Architecture, degrees: Degrees, place: Place, dtype: str = "BF16"
) -> tuple[LocalTensor, ...]:
    """What one rank holds, chunk after chunk."""
    experts = architecture.experts_of(degrees, place)
    return tuple(
        replace(architecture.local(name, degrees, place), dtype=dtype)
        for chunk in architecture.stages(degrees)
        if chunk.pp_rank == place.pp_rank
        for name in architecture.chunk_names(chunk, experts)
    )
