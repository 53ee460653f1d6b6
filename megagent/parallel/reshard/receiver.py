"""The plugin that vLLM itself loads in each of its processes: two backends for its weight transfer.

vLLM finds `register` through the entry point group `vllm.general_plugins`. The backends also serve a plain vLLM
(`LLM(weight_transfer_config=...)`, `vllm serve --weight-transfer-config`): `megagent` (shard_receiver.py) takes each
element from the trainer rank that holds it, `megagent_file` (file_receiver.py) reads a file of whole tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from dataclasses import asdict
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "megagent"
FILE_BACKEND = "megagent_file"
OWNER_VARIABLE = "MEGAGENT_ENGINE_OWNER"  # process id of the process that starts the engine

_registered = False


def register() -> None:
    """Entry point of the plugin: vLLM calls it in the front-end, EngineCore and every worker, maybe repeatedly."""
    global _registered
    if _registered:
        return
    _registered = True
    # By name: the front-end needs neither, and vLLM's layers are not to be imported before vLLM is set up.
    package = __name__.rpartition(".")[0]
    WeightTransferEngineFactory.register_engine(BACKEND, f"{package}.shard_receiver", "ShardReceiver")
    WeightTransferEngineFactory.register_engine(FILE_BACKEND, f"{package}.file_receiver", "FileReceiver")
    end_with_parent()


def end_with_parent() -> None:
    """Ends this vLLM child process when its parent is gone, however that ended.

    EngineCore survives a SIGKILL of its front-end and would keep its memory and cores for ever. PR_SET_PDEATHSIG does
    not help: it fires when the *thread* that started the child ends, and an asyncio or Ray thread may.
    """
    parent = multiprocessing.parent_process()
    owner = os.environ.get(OWNER_VARIABLE)
    if parent is None or owner is None or owner == str(os.getpid()):
        return  # the front-end itself, or a process that no megagent engine started

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


class WorkerCalls:
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), so that `collective_rpc` reaches them."""

    weight_transfer_engine: Any  # a FileReceiver or a ShardReceiver

    def check_weights(self, path: str, version: int) -> str | None:
        """What is wrong with a weights file for this worker's model, or None. Touches nothing. `megagent_file` only."""
        return self.weight_transfer_engine.check(path, version)

    def weight_version(self) -> int | None:
        """Version of the weights that this worker computes with, None for those of the checkpoint, -1 after a sync that
        failed on its way."""
        return self.weight_transfer_engine.version

    def weight_report(self) -> dict[str, Any] | None:
        """Of this worker's last sync, None before any: version, bytes, receive_s, apply_s, checksums (by the name of
        the model's parameter). `megagent` only."""
        report = self.weight_transfer_engine.report
        return None if report is None else asdict(report)
