"""Weight sync: the actor's weights become the engines' weights.

The first transport behind this seam: rank 0 gathers full Hugging Face tensors into one safetensors file under
rollout.sync_dir (/dev/shm: shared memory of one node), and every vLLM worker maps that file.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from megagent.cluster.engines import EngineGroup
from megagent.cluster.ranks import RankGroup
from megagent.errors import InfrastructureError
from megagent.paths import expanded


class FileBridge:
    """Numbers the versions of the weights and moves each from the ranks to the engines."""

    def __init__(self, sync_dir: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="megagent-weights-", dir=expanded(sync_dir).resolve()))
        self.version = 0

    def sync(self, actor: RankGroup, rollout: EngineGroup) -> dict[str, float]:
        """Move the actor's weights; returns seconds, bytes and the version that the engines confirmed."""
        start = time.monotonic()
        version = self.version + 1
        path = self.folder / f"weights-{version}.safetensors"
        try:
            actor.publish_weights(path, version)
            size = path.stat().st_size
            confirmed = rollout.receive_weights(path, version)
        finally:
            path.unlink(missing_ok=True)
        if set(confirmed) != {version}:
            raise InfrastructureError(
                f"weight sync: the engines report versions {confirmed} after version {version} was sent. "
                "Start the run again with trainer.resume=true."
            )
        self.version = version
        return {"sync/version": version, "sync/bytes": size, "timing_s/sync": time.monotonic() - start}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
