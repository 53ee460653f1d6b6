"""One Megatron process, as whoever places processes sees it. Knows nothing of Ray.

Megatron looks at torch while it is imported, so everything that imports it is imported in `setup`, after the platform
has been installed; this module itself costs nothing to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megagent.algos.shares import Steps
from megagent.batch import Jagged, StepBatch
from megagent.config import Config
from megagent.model_source import hf_config_of
from megagent.parallel import platform

if TYPE_CHECKING:
    from megagent.parallel.critic import Critic
    from megagent.parallel.policy import Policy
    from megagent.parallel.reshard.checksum import Checksums
    from megagent.parallel.reshard.sender import Sender
    from megagent.parallel.topology import Topology


class Rank:
    """One of tp x pp x dp ranks of actor and reference policy.

    All methods but `close` are collective: every rank calls the same ones in the same order. Ranks of one data-parallel
    replica give the same rows, and all replicas equally many, or `steps` with equally many micro-batches: see
    megagent.algos.shares.
    """

    def __init__(
        self, config: Config, rank: int, world: int, master: str, port: int, task: Literal["rl", "sft"] = "rl"
    ) -> None:
        """rank of world; master, port: where rank 0 listens; task: whose learning rate and schedule to use."""
        self.config = config
        self.rank = rank
        self.world = world
        self.master = master
        self.port = port
        self.task = task
        self.topology: Topology | None = None
        self._policy: Policy | None = None
        self._critic: Critic | None = None
        self._sender: Sender | None = None

    def setup(self) -> None:
        """Join the other ranks and load the model of config.model.path, a Hugging Face folder.

        The critic, where the algorithm has one, begins with the same weights.
        """
        platform.install(self.config.cluster.platform, self.config.cluster.threads, local_rank=self.rank)
        from megagent.parallel import hf_io, model, models, optimizer, topology
        from megagent.parallel.policy import Policy

        architecture = models.architecture_of(hf_config_of(self.config.model.path))
        self.topology = topology.initialise(self.config, self.rank, self.world, self.master, self.port)
        stage = model.build(self.config, self.topology, architecture)
        hf_io.load_hf(stage, self.config.model.path)
        # After the weights: the optimizer copies those it keeps in higher precision.
        adam = optimizer.build(self.config, stage, self.task)
        self._policy = Policy(self.config, self.topology, stage, adam)
        if self.config.has_critic and self.task == "rl":
            from megagent.parallel.critic import Critic

            stage = model.build(self.config, self.topology, architecture, values=True)
            hf_io.load_hf(stage, self.config.model.path)
            self._critic = Critic(self.config, self.topology, stage, optimizer.build(self.config, stage, "critic"))

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("Rank.setup() must be called first")
        return self._policy

    @property
    def critic(self) -> Critic:
        if self._critic is None:
            raise RuntimeError("algo.estimator has no critic")
        return self._critic

    def log_probs(
        self, shard: StepBatch, model: Literal["actor", "reference"], steps: Steps | None = None
    ) -> dict[str, Jagged] | None:
        """See Policy.log_probs: {"log_probs", "entropy"} on the replica's speaking rank, None on the others."""
        return self.policy.log_probs(shard, model, steps)

    def update(self, shard: StepBatch, steps: Steps | None = None) -> dict[str, float]:
        """One PPO update on the replica's rows; see Policy.update. The same metrics on every rank."""
        self._withdraw_weights()
        return self.policy.update(shard, steps)

    def values(self, shard: StepBatch, steps: Steps | None = None) -> Jagged | None:
        """The critic's value of every response token on the replica's speaking rank, None on the others."""
        return self.critic.values(shard, steps)

    def update_critic(self, shard: StepBatch, steps: Steps | None = None) -> dict[str, float]:
        """One update of the critic on the replica's rows; see Critic.update. The same metrics on every rank."""
        return self.critic.update(shard, steps)

    def supervised_update(self, shard: StepBatch, steps: Steps | None = None) -> dict[str, float]:
        """One optimizer step of the weighted next-token loss; see Policy.supervised_update."""
        self._withdraw_weights()
        return self.policy.supervised_update(shard, steps)

    def publish_weights(self, path: str, version: int) -> None:
        """Write the actor's full Hugging Face tensors into one safetensors file, with its version in the metadata.

        Written beside by global rank 0 and renamed when complete: a reader sees a whole file or none.
        """
        from safetensors.torch import save_file

        from megagent.parallel import hf_io

        tensors = {name: tensor.cpu() for name, tensor in hf_io.gather_hf(self.policy.stage)}
        if self.rank == 0:
            beside = Path(f"{path}.partial")
            save_file(tensors, beside, metadata={"version": str(version)})
            beside.replace(path)

    def open_sync(self, spec: Mapping[str, Any], transport: str, rendezvous: Sequence[Any] | None = None) -> str:
        """Get ready to give the actor's weights to the engines' workers; the digest of the plan.

        spec: terms as SyncSpec.as_json says them; transport, rendezvous: see Sender. May be called again, with others.
        """
        from megagent.parallel.reshard.sender import Sender
        from megagent.parallel.reshard.spec import SyncSpec

        self._close_sync()
        self._sender = Sender.of_stage(self.policy.stage, SyncSpec.from_json(spec), transport, rendezvous)
        return self._sender.digest

    def offer_weights(self, version: int) -> dict[str, Any]:
        """See Sender.offer. Not collective. The weights keep this version until the next update or load."""
        return self.sender.offer(version)

    def send_weights(self, version: int) -> int:
        """See Sender.send: bytes sent. While it runs, the engines' workers receive."""
        return self.sender.send(version)

    def weight_checksums(self) -> Checksums:
        """See Sender.checksums. Not collective."""
        return self.sender.checksums()

    @property
    def sender(self) -> Sender:
        if self._sender is None:
            raise RuntimeError("Rank.open_sync() must be called first")
        return self._sender

    def _withdraw_weights(self) -> None:
        if self._sender is not None:
            self._sender.withdraw()

    def _close_sync(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def export_hf(self, folder: str) -> None:
        """Write the actor as a Hugging Face folder: weights, configuration, tokenizer files of config.model.path."""
        from megagent.parallel import hf_io

        source = self.config.model.path
        hf_io.export_hf(self.policy.stage, folder, hf_config_of(source), source)

    def save(self, folder: str, iteration: int) -> None:
        """Write a checkpoint of model, optimizer and schedule under `folder`, and point `latest` at it."""
        from megagent.parallel import checkpoint

        checkpoint.save(self.policy, Path(folder), iteration, self._critic)

    def load(self, folder: str) -> int:
        """Load the newest checkpoint under `folder`; returns the iteration after which it was written."""
        from megagent.parallel import checkpoint

        self._withdraw_weights()
        return checkpoint.load(self.policy, Path(folder), self._critic)

    def free_memory(self) -> None:
        """Give back what torch keeps of the device's memory for later. Not collective."""
        import torch

        torch.cuda.empty_cache()  # where there is no CUDA, nothing happens

    def close(self) -> None:
        """Leave the process groups. Another Rank may be set up in this process afterwards."""
        self._close_sync()
        self._policy = self._critic = None
        if self.topology is not None:
            self.topology.destroy()
            self.topology = None
