"""How a Megatron model is cut: the degrees of parallelism, who sits where, and which layers a pipeline stage holds.

Integers only. Megatron numbers ranks with the tensor-parallel one fastest, then data, then pipeline; expert weights
have a grid of their own over the same ranks of a stage: expert-tensor fastest, then expert, then the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagent.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Place:
    """The coordinates of one rank."""

    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    edp_rank: int  # which replica of the expert weights


@dataclass(frozen=True, slots=True)
class Chunk:
    """A consecutive part of the model: the only one of a pipeline stage, or one of its vpp."""

    pp_rank: int
    vpp_rank: int
    layers: range  # global numbers, from 0
    has_embedding: bool
    has_output: bool  # final norm and output layer


@dataclass(frozen=True)
class Degrees:
    """How many ways a model is split over tp * pp * dp ranks; ep * etp of a stage's tp * dp ranks hold all experts.

    etp: tensor-parallel degree of the experts; None: as tp. vpp: chunks of each pipeline stage, interleaved.
    count_embedding, count_output: count the embedding, or norm and output layer, as one layer when the layers are dealt
    out (Megatron's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    sequence_parallel: bool = False
    count_embedding: bool = False
    count_output: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.tp * self.dp // (self.ep * self.expert_tp)

    def problems(self) -> list[str]:
        """Every reason why the degrees contradict each other, whatever the model; each with the fix."""
        named = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "etp": self.etp, "dp": self.dp}
        found = [
            f"parallel.{name}={value}: use 1 or more"
            for name, value in named.items()
            if value is not None and value < 1
        ]
        if found:
            return found
        if self.vpp > 1 and self.pp == 1:
            found.append(f"parallel.vpp={self.vpp} interleaves pipeline stages and parallel.pp=1 has none; use vpp=1")
        if (self.tp * self.dp) % (self.ep * self.expert_tp):
            found.append(
                f"parallel.ep={self.ep} x etp={self.expert_tp} does not divide the tp={self.tp} x dp={self.dp} ranks "
                "of a pipeline stage; use an ep (or etp) that does"
            )
        return found

    def place(self, rank: int) -> Place:
        """The coordinates of global rank `rank`."""
        stage, inside = divmod(rank, self.tp * self.dp)
        dp_rank, tp_rank = divmod(inside, self.tp)
        rest, etp_rank = divmod(inside, self.expert_tp)
        edp_rank, ep_rank = divmod(rest, self.ep)
        return Place(rank, tp_rank, stage, dp_rank, ep_rank, etp_rank, edp_rank)

    def places(self) -> Iterator[Place]:
        return (self.place(rank) for rank in range(self.world))

    # --- pipeline ----------------------------------------------------------------------------------------------------

    def chunk_problems(self, layers: int) -> list[str]:
        """Every reason why `layers` layers cannot be dealt out, with the fix."""
        units, chunks = layers + self.count_embedding + self.count_output, self.pp * self.vpp
        if units >= chunks:
            return []
        virtual = f" x vpp={self.vpp}" if self.vpp > 1 else ""
        empty = f"parallel.pp={self.pp}{virtual} makes {chunks} stages of {layers} layers and some would be empty"
        return [f"{empty}; use a product of at most {units}"]

    def chunks(self, layers: int) -> tuple[Chunk, ...]:
        """All chunks of a model of `layers` layers, in the model's order.

        Where they do not divide, the layers left over go to the chunks in the middle, one each: the first chunk has the
        embedding and most activations in flight, the last one the output layer.
        """
        units, count = layers + self.count_embedding + self.count_output, self.pp * self.vpp
        each, more = divmod(units, count)
        first_with_more = (count - more + 1) // 2
        found, start = [], 0
        for number in range(count):
            size = each + (first_with_more <= number < first_with_more + more)
            first, last = number == 0, number == count - 1
            size -= (self.count_embedding and first) + (self.count_output and last)
            vpp_rank, pp_rank = divmod(number, self.pp)
            found.append(Chunk(pp_rank, vpp_rank, range(start, start + size), first, last))
            start += size
        return tuple(found)

    def pipeline_kwargs(self, layers: int) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig that make it deal out the layers as `chunks` does.

        Where all chunks have equally many layers Megatron needs to be told nothing but pp and vpp.
        """
        chunks = self.chunks(layers)
        if self.pp == 1:
            return {}
        if len({len(chunk.layers) for chunk in chunks}) > 1:
            layout = [
                ["embedding"] * chunk.has_embedding + ["decoder"] * len(chunk.layers) + ["loss"] * chunk.has_output
                for chunk in chunks
            ]
            return {"pipeline_model_parallel_layout": layout}
        return {"virtual_pipeline_model_parallel_size": self.vpp} if self.vpp > 1 else {}


def degrees_of(parallel: ParallelConfig) -> Degrees:
    """The degrees of a run's configuration."""
    return Degrees(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        ep=parallel.ep,
        etp=parallel.etp or None,
        dp=parallel.dp,
        sequence_parallel=parallel.sequence_parallel,
    )


def training_problems(degrees: Degrees, has_experts: bool) -> list[str]:
    """Every reason why Megatron cannot train with these degrees although the weights can be laid out so."""
    if not has_experts:
        return []
    found = []
    if degrees.tp > 1 and not degrees.sequence_parallel:
        found.append(
            f"parallel.tp={degrees.tp}: experts on several tensor ranks are trained only with sequence parallelism; "
            "set parallel.sequence_parallel=true"
        )
    if degrees.ep == 1 and degrees.expert_tp != degrees.tp:
        # Each tensor rank has tokens of its own, and without ep nobody adds up what they say about its experts.
        found.append(
            f"parallel.etp={degrees.expert_tp} is not tp={degrees.tp}, which Megatron's gradients ask for while "
            "parallel.ep=1; leave etp out, or set parallel.ep"
        )
    return found
