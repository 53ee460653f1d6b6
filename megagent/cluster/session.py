"""Ray's start and end. A local session lives and dies with this process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from megagent.config import Config
from megagent.errors import InfrastructureError

OBJECT_STORE_BYTES = 512 * 1024**2  # a local session passes step batches of a tiny model through it


def worker_environment(config: Config) -> dict[str, str]:
    """Environment variables of every process that Ray starts for the run."""
    threads = str(config.cluster.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Ranks and engine take turns on the same cores: a thread that spins while it waits steals them from the other.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's tensor parallel overlap relies on one queue
    }


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Ray for the length of the block: started here (cluster.ray_address=local) or joined at host:port."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default of 15 lets anything else on a shared machine go before the ranks, which are what the run is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    runtime = {"env_vars": worker_environment(config)}
    # Ray takes SIGTERM for itself when it starts; it must go on meaning what the program made of it.
    terminated = signal.getsignal(signal.SIGTERM)
    common = {"runtime_env": runtime, "log_to_driver": False, "logging_level": logging.ERROR}
    for last_try in (False, True):
        try:
            if config.cluster.ray_address == "local":
                # CPU ranks take no CPU resource, so the count of cores limits nothing here.
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    **common,
                )
            else:
                ray.init(address=config.cluster.ray_address, **common)
            break
        except Exception as error:  # Ray raises a bare Exception when its own processes are late
            ray.shutdown()
            # One Ray agent has a fixed port. Where it is taken, the agent goes on without it after some tries, but on a
            # busy machine that alone may be too late for Ray's deadline; the second start has its files in the cache.
            if last_try:
                raise InfrastructureError(
                    f"cluster.ray_address={config.cluster.ray_address}: Ray did not start or answer ({error}). "
                    "Use local for one machine, or the host:port that `ray start --head` printed."
                ) from error
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)
        yield
    finally:
        ray.shutdown()
