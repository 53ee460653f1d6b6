"""vLLM's processes as the engine starts and ends them: environment, arguments, and whom to kill.

vLLM is imported in `make_llm` only, after `set_environment`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megagent.config import Config

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

RECEIVER = "megagent.parallel.reshard.receiver"  # vLLM imports it by name
CLOSE_TIMEOUT_S = 5.0  # for vLLM to end by itself before its processes are killed
PREFILL_TOKENS = 8192  # CPU: tokens of one step of the engine


def backend(config: Config) -> str:
    """The weight transfer backend of our plugin that takes weights as rollout.sync says."""
    return "megagent_file" if config.rollout.sync == "gather" else "megagent"


def set_environment(config: Config, timeout_s: float, sockets: str) -> None:
    """All environment variables of vLLM, which reads them at its import and in the processes that it starts."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings tell of every default that the CPU changes
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Ranks of the trainer share the cores with the engine's workers: let the kernel place the threads.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(config.cluster.threads)
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(1, round(timeout_s)))
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    os.environ["MEGAGENT_ENGINE_OWNER"] = str(os.getpid())


def make_llm(config: Config, model_path: Path) -> AsyncLLM:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    rollout = config.rollout
    max_model_len = rollout.max_prompt_tokens + rollout.max_response_tokens
    if current_platform.is_cpu():
        # With one rank the worker runs inside EngineCore: one process less to start and to talk to. vLLM forces a
        # process of its own upon it, to bind its threads, unless this says otherwise; EngineCore stays a process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if rollout.tp == 1 else "1"
        # Some small functions are compiled even in eager mode: seconds at the first request, and a C++ compiler needed.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        options: dict[str, Any] = {
            "distributed_executor_backend": "uni" if rollout.tp == 1 else "mp",
            "kv_cache_memory_bytes": rollout.kv_cache_gib << 30,
            "enforce_eager": True,  # compiling for the CPU takes longer than a small run
            "block_size": 32,  # tokens; vLLM's 128 would share next to nothing between short prompts
            # A request with a seed whose prompt is cut into chunks makes vLLM 0.32 rewind the offset of its generator,
            # which a CPU generator does not have; the engine dies of it. Whole prompts only, then.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(PREFILL_TOKENS, max_model_len, rollout.max_sequences),
        }
    else:
        options = {
            "gpu_memory_utilization": rollout.memory_fraction,
            "enforce_eager": rollout.enforce_eager,
            "enable_sleep_mode": rollout.placement == "colocated",
        }
    args = AsyncEngineArgs(
        model=str(model_path),
        skip_tokenizer_init=True,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[config.model.dtype],
        tensor_parallel_size=rollout.tp,
        max_model_len=max_model_len,
        max_num_seqs=rollout.max_sequences,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # not the folder's top-p and temperature
        seed=config.trainer.seed,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=f"{RECEIVER}.WorkerCalls",
        weight_transfer_config=WeightTransferConfig(backend=backend(config)),
        **options,
    )
    return AsyncLLM.from_engine_args(args)


def children() -> list[psutil.Process]:
    """Processes below this one, but for Python's resource trackers: they end by themselves, after they cleaned up."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("multiprocessing.resource_tracker" in argument for argument in process.cmdline()):
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kills what is still alive and waits for its end. psutil compares start times: a recycled process id is safe."""
    alive = [process for process in processes if not ended(process)]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    # Not psutil's wait: it would take the exit status that multiprocessing waits for.
    while not all(map(ended, alive)) and time.monotonic() < deadline:
        time.sleep(0.01)


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
