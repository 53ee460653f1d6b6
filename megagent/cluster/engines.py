"""The vLLM engines as Ray actors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from megagent.cluster.calls import answer, wait_all
from megagent.cluster.placement import Placement
from megagent.config import Config
from megagent.errors import MegagentError
from megagent.model_source import model_folder

if TYPE_CHECKING:
    from megagent.rollout.engine import Generation, Sampling


CLOSE_TIMEOUT_S = 10.0


@ray.remote(max_concurrency=4096)
class EngineActor:
    """Hosts one `megagent.rollout.engine.VllmEngine`; vLLM is imported here and nowhere on the driver."""

    async def start(self, config: Config) -> None:
        from megagent.rollout.engine import VllmEngine

        self.engine = VllmEngine(config, model_folder(config.model.path))
        await self.engine.start()

    async def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self.engine, method)(*arguments)


class EngineGroup:
    """`rollout.engines` engines with the same weights; an episode stays with one of them, for its cached prefix."""

    def __init__(self, config: Config, placement: Placement) -> None:
        self.timeout_s = config.cluster.timeout_s
        self.actors: list[ActorHandle] = [
            EngineActor.options(**placement.engine_options(index)).remote() for index in range(config.rollout.engines)
        ]
        self.starting = {f"engine {i}": actor.start.remote(config) for i, actor in enumerate(self.actors)}

    def wait_until_started(self) -> None:
        """Until every engine can generate. May be called again."""
        wait_all(self.starting, "start of the engines", self.timeout_s)

    async def generate(self, slot: int, prompt_ids: list[int], sampling: Sampling) -> Generation:
        """One response to one prompt, for the episode in `slot`."""
        index = slot % len(self.actors)
        call = self.actors[index].call.remote("generate", prompt_ids, sampling)
        return await answer(call, f"engine {index}", "generation", self.timeout_s, "cluster.timeout_s")

    def receive_weights(self, path: Path, version: int) -> list[int]:
        """Take over the weights in a safetensors file of full Hugging Face tensors; the version each engine has now."""
        calls = self.calls("receive_weights", str(path), version)
        return list(wait_all(calls, "weight sync", self.timeout_s).values())

    def sleep(self) -> None:
        """Give the devices to the trainer until the next sync (rollout.placement=colocated)."""
        wait_all(self.calls("sleep"), "sleep of the engines", self.timeout_s)

    def nodes(self) -> list[str]:
        """Ray's id of the node of each engine."""
        calls = {f"engine {i}": actor.node.remote() for i, actor in enumerate(self.actors)}
        return list(wait_all(calls, "places of the engines", self.timeout_s).values())

    def open_sync(self, terms: Mapping[str, Any]) -> dict[str, ray.ObjectRef]:
        """Calls under way that tell every engine the terms of all weight syncs, and its number."""
        return {
            f"engine {i}": actor.call.remote("open_sync", {**terms, "engine": i}) for i, actor in enumerate(self.actors)
        }

    def calls(self, method: str, *arguments: Any) -> dict[str, ray.ObjectRef]:
        """Calls under way to a method of every engine."""
        return {f"engine {i}": actor.call.remote(method, *arguments) for i, actor in enumerate(self.actors)}

    def close(self) -> None:
        """End the engines and the processes that they started."""
        # One that does not end by itself, or is dead already, is killed: no error of its end hides the run's own.
        with contextlib.suppress(MegagentError):
            wait_all(self.calls("close"), "end of the engines", CLOSE_TIMEOUT_S)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
