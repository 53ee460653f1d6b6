"""The trainer's end of a weight sync, in each Megatron rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megagent.errors import InfrastructureError, MegagentError
from megagent.parallel.reshard.checksum import Checksums, add_checksum, copy_checksum
from megagent.parallel.reshard.plan import Copy
from megagent.parallel.reshard.spec import SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import sender_end
from megagent.parallel.reshard.transports.base import DTYPES

if TYPE_CHECKING:
    from megagent.parallel.model import Stage


class Sender:
    """Gives a rank's share of the weights to the workers that need it, from the tensors where they lie.

    Every rank has one, made from the same terms. A version is offered, sent and, before anything changes the weights,
    withdrawn; versions count upwards.
    """

    def __init__(
        self,
        plan: SyncPlan,
        rank: int,
        tensors: Mapping[str, Tensor],
        transport: str,
        rendezvous: Sequence[Any] | None = None,
    ) -> None:
        """tensors: the rank's, by canonical name; transport: a name of megagent.parallel.reshard.transports;
        rendezvous: host and port where rank 0 listens, for those between peers.

        Raises MegagentError for tensors that are not what was planned and for a transport that cannot carry the plan.
        """
        self.digest = plan.digest
        self._rank = rank
        # In the pieces that travel: none is cast as a whole, however large it is.
        self._copies = tuple(copy for copies in plan.rounds for copy in copies if copy.source_rank == rank)
        self._tensors = _planned(plan, rank, self._copies, tensors)
        self._dtypes = {
            (copy.target_rank, copy.target): DTYPES[plan.plan.target.tensor(copy.target_rank, copy.target).dtype]
            for copy in self._copies
        }
        self._offered: int | None = None
        self._latest = -1  # version that was offered last
        self._end = sender_end(transport, plan, rank, self._tensors, rendezvous)

    @classmethod
    def of_stage(cls, stage: Stage, spec: SyncSpec, transport: str, rendezvous: Sequence[Any] | None = None) -> Sender:
        """For the parameters of a Megatron rank. Raises as the constructor does, and ConfigError or MegagentError for
        terms that are not this rank's or cannot be planned."""
        from megagent.parallel import hf_io

        if spec.degrees != stage.degrees:
            raise MegagentError(
                f"weight sync: its terms are for ranks of {spec.degrees}, and these are of {stage.degrees}; make the "
                "terms from the run's own configuration"
            )
        plan = make_sync_plan(spec, stage.architecture)
        return cls(plan, stage.place.rank, hf_io.stage_parameters(stage), transport, rendezvous)

    def offer(self, version: int) -> dict[str, Any]:
        """What receivers need in order to read this version, as JSON. Nothing is copied. It may be offered again while
        it stands. Raises MegagentError for a version that is not newer than the last one."""
        if version < 0 or (version <= self._latest and version != self._offered):
            raise MegagentError(
                f"weight sync: version {version} is offered after version {self._latest}, and the weights may have "
                "changed; count versions upwards, one for each sync"
            )
        offer = self._end.offer(version)
        self._latest = self._offered = version
        return offer

    def send(self, version: int) -> int:
        """Serve all receivers of an offered version; bytes sent, 0 where receivers read by themselves. Raises
        InfrastructureError if a receiver is gone or late, or wants another version."""
        if version != self._offered:
            raise InfrastructureError(
                f"weight sync: version {version} is wanted of rank {self._rank}, which offers "
                f"{'nothing' if self._offered is None else f'version {self._offered}'}; offer it, then send it"
            )
        return self._end.send(version)

    def withdraw(self) -> None:
        """The weights are about to change: a receiver that still reads them finds out. May be called again."""
        self._offered = None
        self._end.withdraw()

    def checksums(self) -> Checksums:
        """Of all that this rank sends of its weights as they are now; see checksum.merge for those of all ranks."""
        sums: Checksums = defaultdict(dict)
        for copy in self._copies:
            part = (
                self._tensors[copy.source].detach()[copy.source_slices].to(self._dtypes[copy.target_rank, copy.target])
            )
            add_checksum(sums[copy.target_rank], copy.target, copy_checksum(copy, part))
        return dict(sums)

    def close(self) -> None:
        self.withdraw()
        self._end.close()


def _planned(plan: SyncPlan, rank: int, copies: Sequence[Copy], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are read. Raises MegagentError if they are not what the plan says of them."""
    read = dict.fromkeys(copy.source for copy in copies)
    problems = []
    for name in read:
        expected, found = plan.plan.source.tensor(rank, name), tensors.get(name)
        if found is None:
            problems.append(f"{name} is missing")
        elif tuple(found.shape) != expected.shape or found.dtype != DTYPES[expected.dtype]:
            problems.append(
                f"{name} is {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
            )
        elif not found.is_contiguous():
            problems.append(f"{name} does not lie in one piece")
    if problems:
        raise MegagentError(
            f"weight sync: rank {rank} does not hold what its terms say; give them the dtype of the model "
            "(model.dtype) and its degrees:" + "".join(f"\n  {problem}" for problem in problems)
        )
    return {name: tensors[name] for name in read}
