"""The Megatron ranks as Ray actors: one process a rank, all of them called together."""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.actor import ActorHandle

from megagent.algos.shares import Share, equal_shares, gathered, token_shares
from megagent.batch import Jagged, StepBatch
from megagent.cluster.calls import wait_all
from megagent.cluster.placement import Placement
from megagent.config import Config
from megagent.errors import InfrastructureError
from megagent.model_source import hf_config_of, model_folder
from megagent.parallel.models import architecture_of

# Above those that Ray gives to its workers, below those that Linux gives to outgoing connections.
RENDEZVOUS_PORTS = range(22000, 32000)

Task = Literal["rl", "sft"]  # decides the learning rate and its schedule


@ray.remote
class RankActor:
    """Hosts one `megagent.parallel.rank.Rank`; Megatron is imported here and nowhere on the driver."""

    def __init__(self) -> None:
        self.rank: Any = None

    def rendezvous(self) -> tuple[str, int]:
        """The address and a free port of this process' node, where rank 0 will listen."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def setup(self, config: Config, rank: int, master: str, port: int, task: Task) -> None:
        from megagent.parallel.rank import Rank

        # A hub model lies at another path on every node.
        model = replace(config.model, path=str(model_folder(config.model.path)))
        self.rank = Rank(replace(config, model=model), rank, config.parallel.world, master, port, task)
        self.rank.setup()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.rank, method)(*arguments)


def free_port(address: str) -> int:
    """A port of this node that nobody listens on and that no connection is given by itself.

    Rank 0 listens seconds later, when it has loaded Megatron: a port from the system's own range may be gone by then.
    """
    for port in random.SystemRandom().sample(RENDEZVOUS_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    ports = f"{RENDEZVOUS_PORTS.start} and {RENDEZVOUS_PORTS.stop - 1}"
    raise InfrastructureError(f"none of 100 ports between {ports} is free on {address}; end what listens there")


class RankGroup:
    """Actor and reference policy over TP x PP x DP ranks.

    The rows of a batch are dealt to the data-parallel replicas by megagent.algos.shares; every tensor and pipeline rank
    of a replica gets the same ones.
    """

    def __init__(self, config: Config, placement: Placement, task: Task = "rl") -> None:
        self.config = config
        self.timeout_s = config.cluster.timeout_s
        self.actors: list[ActorHandle] = [
            RankActor.options(**placement.rank_options(rank)).remote() for rank in range(config.parallel.world)
        ]
        address = wait_all({"rank 0": self.actors[0].rendezvous.remote()}, "start of the ranks", self.timeout_s)
        master, port = address["rank 0"]
        self.starting = {
            f"rank {rank}": actor.setup.remote(config, rank, master, port, task)
            for rank, actor in enumerate(self.actors)
        }

    def wait_until_started(self) -> None:
        """Until every rank has joined the others and loaded the model. May be called again."""
        wait_all(self.starting, "start of the ranks", self.timeout_s)

    def replica_of(self, rank: int) -> int:
        """The data-parallel replica of a rank, in Megatron's order tp, dp, pp (tp fastest)."""
        return rank // self.config.parallel.tp % self.config.parallel.dp

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return list(wait_all(self.calls(method, *arguments), method, self.timeout_s).values())

    def shares(self, rows: StepBatch, update: int | None = None) -> list[Share]:
        """What each replica gets of the rows of a pass. update: how many updates came before, if it is one."""
        config = self.config
        if not config.trainer.micro_batch_tokens:
            return equal_shares(len(rows), config.parallel.dp)
        hidden = architecture_of(hf_config_of(config.model.path)).hidden
        return token_shares(rows["prompts"].lengths + rows["responses"].lengths, config, hidden, update)

    def _call_on_rows(self, method: str, rows: StepBatch, shares: list[Share], *arguments: Any) -> list[Any]:
        parts = [(ray.put(share.of(rows)), *arguments, share.steps) for share in shares]
        calls = {
            f"rank {rank}": actor.call.remote(method, *parts[self.replica_of(rank)])
            for rank, actor in enumerate(self.actors)
        }
        return list(wait_all(calls, method, self.timeout_s).values())

    def _by_replica(self, answers: list[Any]) -> list[Any]:
        """The answer of every replica's speaking rank."""
        found = {self.replica_of(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        return [found[replica] for replica in range(self.config.parallel.dp)]

    def log_probs(self, rows: StepBatch, model: Literal["actor", "reference"]) -> dict[str, Jagged]:
        """Log-probs and entropy of every response token by teacher forcing: Jagged over responses, each."""
        shares = self.shares(rows)
        parts = self._by_replica(self._call_on_rows("log_probs", rows, shares, model))
        return {name: gathered([part[name] for part in parts], shares) for name in parts[0]}

    def update(self, rows: StepBatch, number: int) -> dict[str, float]:
        """One PPO update over all mini-batches of `rows`; its metrics, the same on every rank. number: from 1."""
        shares = self.shares(rows, number - 1)
        return next(answer for answer in self._call_on_rows("update", rows, shares) if answer)

    def values(self, rows: StepBatch) -> Jagged:
        """The critic's value of every response token: Jagged over responses."""
        shares = self.shares(rows)
        return gathered(self._by_replica(self._call_on_rows("values", rows, shares)), shares)

    def update_critic(self, rows: StepBatch, number: int) -> dict[str, float]:
        """One update of the critic over all mini-batches of `rows`; see update."""
        shares = self.shares(rows, number - 1)
        return next(answer for answer in self._call_on_rows("update_critic", rows, shares) if answer)

    def supervised_update(self, rows: StepBatch) -> dict[str, float]:
        """One optimizer step of the weighted next-token loss."""
        return next(answer for answer in self._call_on_rows("supervised_update", rows, self.shares(rows)) if answer)

    def publish_weights(self, path: Path, version: int) -> None:
        """Write the full Hugging Face tensors of the actor into one safetensors file."""
        self._call("publish_weights", str(path), version)

    def save(self, folder: Path, iteration: int) -> None:
        self._call("save", str(folder.resolve()), iteration)

    def load(self, folder: Path) -> int:
        """Load the newest checkpoint under `folder`; the iteration after which it was written."""
        return int(self._call("load", str(folder.resolve()))[0])

    def export_hf(self, folder: Path) -> None:
        self._call("export_hf", str(folder.resolve()))

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)

    def free_memory(self) -> None:
        """Give back what torch keeps of the devices' memory: others are about to need it."""
        self._call("free_memory")

    def nodes(self) -> list[str]:
        """Ray's id of the node of each rank."""
        calls = {f"rank {rank}": actor.node.remote() for rank, actor in enumerate(self.actors)}
        return list(wait_all(calls, "places of the ranks", self.timeout_s).values())

    def meeting_point(self) -> tuple[str, int]:
        """The address and a free port of rank 0's node, where ranks and engines can find each other."""
        return wait_all({"rank 0": self.actors[0].rendezvous.remote()}, "meeting point", self.timeout_s)["rank 0"]

    def calls(self, method: str, *arguments: Any) -> dict[str, ray.ObjectRef]:
        """Calls under way to a method of every rank, for whoever waits for others at the same time."""
        return {f"rank {rank}": actor.call.remote(method, *arguments) for rank, actor in enumerate(self.actors)}
