"""The rollout engine: vLLM's asynchronous engine behind five verbs (start, generate, receive_weights, version, close).

It samples token ids from token ids; text, chat templates and stop strings are the caller's business. Weights arrive
through vLLM's own weight-transfer API; `megagent.parallel.reshard.receiver` is its other end, inside vLLM's processes.
An engine that misses a deadline, dies, or fails inside a weight update is unusable from then on: its processes are
ended and every call raises InfrastructureError. It never serves half-updated weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from megagent.config import Config
from megagent.errors import ConfigError, InfrastructureError, MegagentError

if TYPE_CHECKING:
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.engine.async_llm import AsyncLLM

RECEIVER = "megagent.parallel.reshard.receiver"  # vLLM imports it by name; this module does not import vLLM by itself
BACKEND = "megagent_file"
CLOSE_TIMEOUT_S = 5.0  # for vLLM to end by itself before its processes are killed
WATCH_PERIOD_S = 0.5
PREFILL_TOKENS = 8192  # CPU: tokens of one step of the engine

T = TypeVar("T")


@dataclass(frozen=True)
class Sampling:
    """How to sample one response.

    temperature: 0 is greedy; max_tokens: None is rollout.max_response_tokens; seed: the same seed and weights give the
    same response to a prompt whatever else is in the batch, up to rounding; stop: token ids that end a response beside
    the model's own end-of-sequence ids.
    """

    temperature: float = 1.0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """One response. The last token is the one that stopped it, if any did.

    token_ids: [tokens]; log_probs: [tokens], of each sampled token under the distribution it was sampled from (after
    temperature; greedy: temperature 1); finish_reason: stop | length; version: of the weights, None before any sync.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    version: int | None


class VllmEngine:
    """One vLLM engine with config.rollout.tp tensor-parallel ranks, owned by this process."""

    def __init__(self, config: Config, model_path: str | Path, timeout_s: float | None = None) -> None:
        """config: rollout, model.dtype and cluster are read; model_path: a Hugging Face folder with safetensors;
        timeout_s: deadline of every single wait, cluster.timeout_s if None. Raises ConfigError."""
        self._config = config
        self._model_path = Path(model_path)
        self._timeout_s = config.cluster.timeout_s if timeout_s is None else timeout_s
        self._vocabulary, self._end_tokens = _token_ids(self._model_path)
        self._llm: AsyncLLM | None = None
        self._failure: str | None = None  # why the engine is unusable
        self._version: int | None = None
        self._updating = False
        self._request_ids = itertools.count()
        self._waits: set[asyncio.Timeout] = set()
        self._processes: list[psutil.Process] = []
        self._watcher: asyncio.Task[None] | None = None
        self._sockets = ""

    @property
    def version(self) -> int | None:
        """Version of the weights in use; None for those of the model folder."""
        return self._version

    @property
    def processes(self) -> list[int]:
        """Process ids of EngineCore and its workers."""
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Starts vLLM's processes and loads the model; tens of seconds in which the event loop stands still.

        Raises InfrastructureError if it fails or takes longer than the deadline.
        """
        if self._llm is not None:
            raise MegagentError("this engine has been started before; make a new one.")
        self._sockets = tempfile.mkdtemp(prefix="megagent-vllm-")
        _set_environment(self._config, self._timeout_s, self._sockets)
        if not any(plugin.value == f"{RECEIVER}:register" for plugin in entry_points(group="vllm.general_plugins")):
            raise InfrastructureError("vLLM cannot find megagent's plugin: install megagent (pip install -e .).")
        before = set(_children())
        late = threading.Event()

        def started() -> list[psutil.Process]:
            return [process for process in _children() if process not in before]

        def end() -> None:
            late.set()
            _kill(started())

        # AsyncLLM's constructor blocks and has no deadline of its own; it fails once its processes are gone.
        deadline = threading.Timer(self._timeout_s, end)
        deadline.daemon = True
        deadline.start()
        try:
            self._llm = _make_llm(self._config, self._model_path)
            self._processes = started()
            await self._call("preparing the engine", self._initialize())
        except Exception as error:
            self._processes = started()
            reason = f"it took longer than {self._timeout_s:g} s" if late.is_set() else str(error)
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise self._fail(f"vLLM did not start for {self._model_path}: {reason}") from error
        finally:
            deadline.cancel()
        self._watcher = asyncio.create_task(self._watch())

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Samples one response to a prompt of token ids.

        Raises MegagentError for a prompt or a setting outside the configured limits, InfrastructureError for an
        engine that is dead or late.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        max_tokens = self._check_request(prompt_ids, sampling)
        params = SamplingParams(
            n=1,
            temperature=sampling.temperature,
            max_tokens=max_tokens,
            seed=sampling.seed,
            stop_token_ids=sorted({*self._end_tokens, *sampling.stop}),
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return await self._call("a response", self._generate(list(prompt_ids), params))

    async def receive_weights(self, path: str | Path, version: int) -> None:
        """Takes over the weights of a safetensors file with every tensor of the model, by Hugging Face name.

        Waits until the running responses are complete; requests that come meanwhile are answered with the new weights.
        Raises MegagentError with nothing changed if the file does not fit or version is not newer than the present
        one or another update is under way; InfrastructureError, and the engine is unusable, if it fails after that.
        """
        if self._version is not None and version <= self._version:
            raise MegagentError(
                f"weights of version {version} are not newer than the engine's version {self._version}; "
                "count versions upwards, one for each sync."
            )
        if self._updating:
            raise MegagentError(f"version {version} came while another weight update is under way; await that first.")
        self._updating = True
        try:
            await self._receive(str(path), version)
        finally:
            self._updating = False

    async def close(self) -> None:
        """Ends all processes of the engine. May be called repeatedly, and after a failure."""
        self._failure = self._failure or "it has been closed"
        self._expire()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would log the end of EngineCore as an error
            await asyncio.to_thread(llm.shutdown, CLOSE_TIMEOUT_S)
        _kill(self._processes)
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def _initialize(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine().init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    async def _generate(self, prompt_ids: list[int], params: Any) -> Generation:
        from vllm.inputs import tokens_input

        llm = self._engine()
        prompt = tokens_input(prompt_ids)
        final = None
        async for output in llm.generate(prompt, params, request_id=str(next(self._request_ids))):
            final = output
        if final is None or final.outputs[0].finish_reason not in ("stop", "length"):
            reason = "nothing" if final is None else final.outputs[0].finish_reason
            raise InfrastructureError(f"vLLM ended a response with {reason!r} instead of stop or length.")
        [completion] = final.outputs
        token_ids = list(completion.token_ids)
        log_probs = [entry[token].logprob for token, entry in zip(token_ids, completion.logprobs, strict=True)]
        return Generation(token_ids, log_probs, completion.finish_reason, _version_of(completion.weight_versions))

    async def _receive(self, path: str, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._engine()
        problems = await self._call(
            "checking new weights", llm.collective_rpc("check_weights", kwargs={"path": path, "version": version})
        )
        for problem in problems:
            if problem is not None:
                raise MegagentError(problem)
        update = WeightTransferUpdateRequest(update_info={"path": path, "version": version})
        try:
            await self._call("draining the engine", llm.pause_generation(mode="wait", clear_cache=True))
            await self._call("opening a weight update", llm.start_weight_update())
            await self._call("loading new weights", llm.update_weights(update))
            await self._call("ending a weight update", llm.finish_weight_update(weight_version=str(version)))
            versions = await self._call("reading the weight version", llm.collective_rpc("weight_version"))
            if any(found != version for found in versions):
                raise InfrastructureError(f"workers hold weights of versions {versions} instead of {version}")
            # The pause has emptied the cache; this fails if a block of the old weights is still in use.
            if not await self._call("resetting the prefix cache", llm.reset_prefix_cache()):
                raise InfrastructureError("the prefix cache still holds blocks of the old weights")
            self._version = version
            await self._call("resuming the engine", llm.resume_generation())
        except BaseException as error:  # a cancelled update leaves half of the layers too
            failure = self._fail(f"the update to weights version {version} failed: {error!s}")
            if not isinstance(error, Exception):
                raise
            raise failure from error

    def _check_request(self, prompt_ids: Sequence[int], sampling: Sampling) -> int:
        limits = self._config.rollout
        max_tokens = limits.max_response_tokens if sampling.max_tokens is None else sampling.max_tokens
        if not 1 <= len(prompt_ids) <= limits.max_prompt_tokens:
            raise MegagentError(
                f"a prompt of {len(prompt_ids)} tokens is outside 1 to rollout.max_prompt_tokens="
                f"{limits.max_prompt_tokens}; shorten it or raise the limit."
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocabulary:
            raise MegagentError(  # vLLM would not notice, and its engine process would die of the lookup
                f"a prompt has token ids from {min(prompt_ids)} to {max(prompt_ids)}, but the vocabulary of "
                f"{self._model_path} ends at {self._vocabulary - 1}; use the model's own tokenizer."
            )
        if not 1 <= max_tokens <= limits.max_response_tokens:
            raise MegagentError(
                f"max_tokens={max_tokens} is outside 1 to rollout.max_response_tokens={limits.max_response_tokens}."
            )
        if not sampling.temperature >= 0:
            raise MegagentError(f"temperature={sampling.temperature} is negative; 0 is greedy.")
        return max_tokens

    def _engine(self) -> AsyncLLM:
        if self._failure is not None:
            raise self._unusable()
        if self._llm is None:
            raise MegagentError("the rollout engine has not been started; await start() first.")
        return self._llm

    async def _call(self, what: str, wait: Awaitable[T]) -> T:
        """Awaits vLLM under the deadline; ends early with InfrastructureError when the engine fails meanwhile."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                self._waits.add(limit)
                try:
                    return await wait
                finally:
                    self._waits.discard(limit)
        except MegagentError:
            raise
        except Exception as error:
            if self._failure is not None:
                raise self._unusable() from error
            if isinstance(error, TimeoutError):
                raise self._fail(f"{what} took longer than {self._timeout_s:g} s") from error
            if self._llm is not None and self._llm.errored:
                raise self._fail(f"vLLM's engine process died ({error})") from error
            raise InfrastructureError(f"{what} failed: {error}") from error

    async def _watch(self) -> None:
        """Notices the death of vLLM's processes, which vLLM does not report to every waiting call."""
        while self._failure is None and self._llm is not None:
            if self._llm.errored:
                self._fail("vLLM's engine process died")
                return
            await asyncio.sleep(WATCH_PERIOD_S)

    def _fail(self, reason: str) -> InfrastructureError:
        """Marks the engine unusable, ends its processes and every wait. Returns the error; the first reason stays."""
        if self._failure is None:
            self._failure = reason.rstrip(".")
            if self._llm is not None and self._llm.output_handler is not None:
                self._llm.output_handler.cancel()  # it would log the end of EngineCore as an error
            _kill(self._processes)
            self._expire()
        return self._unusable()

    def _unusable(self) -> InfrastructureError:
        return InfrastructureError(f"the rollout engine is unusable: {self._failure}; start a new one.")

    def _expire(self) -> None:
        for limit in self._waits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


def _set_environment(config: Config, timeout_s: float, sockets: str) -> None:
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


def _make_llm(config: Config, model_path: Path) -> AsyncLLM:
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
        options = {"gpu_memory_utilization": rollout.memory_fraction, "enforce_eager": rollout.enforce_eager}
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
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        **options,
    )
    return AsyncLLM.from_engine_args(args)


def _token_ids(folder: Path) -> tuple[int, frozenset[int]]:
    """Size of the vocabulary and end-of-sequence ids of a Hugging Face folder. Raises ConfigError if it is none."""
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError([f"{folder} has no config.json; give a Hugging Face model folder."], source="rollout engine")
    settings = json.loads(config.read_text())
    end_tokens: set[int] = set()
    for file in (config, folder / "generation_config.json"):
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            end_tokens.update([ids] if isinstance(ids, int) else ids)
    return settings["vocab_size"], frozenset(end_tokens)


def _version_of(spans: Sequence[WeightVersionSpan] | None) -> int | None:
    """Version that sampled a response; vLLM calls the weights of the model folder "default"."""
    version = spans[-1].version if spans else "default"
    return None if version == "default" else int(version)


def _children() -> list[psutil.Process]:
    """Processes below this one, but for Python's resource trackers: they end by themselves, after they cleaned up."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("multiprocessing.resource_tracker" in argument for argument in process.cmdline()):
                found.append(process)
    return found


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kills what is still alive and waits for its end. psutil compares start times: a recycled process id is safe."""
    alive = [process for process in processes if not _ended(process)]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    # Not psutil's wait: it would take the exit status that multiprocessing waits for.
    while not all(map(_ended, alive)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
