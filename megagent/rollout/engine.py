"""The rollout engine: vLLM's asynchronous engine behind a few verbs (start, generate, close, and those of a sync).

It samples token ids from token ids; text, chat templates and stop strings are the caller's business. Weights arrive
through vLLM's own weight-transfer API; `megagent.parallel.reshard.receiver` is its other end, inside vLLM's processes,
and `residency` knows the only order in which that may happen. An engine that misses a deadline, dies, or fails inside
a weight update is unusable from then on: its processes are ended and every call raises InfrastructureError. It never
serves half-updated weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from megagent.config import Config
from megagent.errors import ConfigError, InfrastructureError, MegagentError
from megagent.rollout.residency import Phase, Residency
from megagent.rollout.vllm_process import CLOSE_TIMEOUT_S, RECEIVER, children, kill, make_llm, set_environment

if TYPE_CHECKING:
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.engine.async_llm import AsyncLLM

WATCH_PERIOD_S = 0.5

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
        self._residency = Residency(colocated=config.rollout.placement == "colocated")
        self._request_ids = itertools.count()
        self._waits: set[asyncio.Timeout] = set()
        self._processes: list[psutil.Process] = []
        self._watcher: asyncio.Task[None] | None = None
        self._sockets = ""

    @property
    def version(self) -> int | None:
        """Version of the weights in use; None for those of the model folder."""
        return self._residency.version

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
        set_environment(self._config, self._timeout_s, self._sockets)
        if not any(plugin.value == f"{RECEIVER}:register" for plugin in entry_points(group="vllm.general_plugins")):
            raise InfrastructureError("vLLM cannot find megagent's plugin: install megagent (pip install -e .).")
        before = set(children())
        late = threading.Event()

        def started() -> list[psutil.Process]:
            return [process for process in children() if process not in before]

        def end() -> None:
            late.set()
            kill(started())

        # AsyncLLM's constructor blocks and has no deadline of its own; it fails once its processes are gone.
        deadline = threading.Timer(self._timeout_s, end)
        deadline.daemon = True
        deadline.start()
        try:
            self._llm = make_llm(self._config, self._model_path)
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
        self._residency.require_requests()
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

    async def open_sync(self, terms: Mapping[str, Any]) -> None:
        """Agrees with the trainer on the plan of all syncs. terms: the init_info of `reshard.receiver`.

        Raises InfrastructureError, in the receiver's words, if the plan, the model or the trainer does not fit; the
        engine is unusable then.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(terms))
        try:
            await self._call("agreeing on the weight sync", self._engine().init_weight_transfer_engine(request))
        except InfrastructureError as error:
            # After an error in one worker, vLLM takes the others' answers for those of its next call to them.
            raise self._fail(str(error)) from error

    async def sleep(self) -> None:
        """Colocated only: lets running responses end, then gives up weights and cache until the next sync."""
        self._engine()
        with self._changing("falling asleep", self._residency.sleep()):
            await self._fall_asleep()

    async def prepare(self, version: int) -> None:
        """Makes room for weights of this version: a colocated engine sleeps, unless it does already, and then wakes
        without weights; a disaggregated one drains. Requests that come from now on are answered with the new weights.

        Raises MegagentError with nothing changed if the version is not newer than the present one or another update
        is under way; InfrastructureError, and the engine is unusable, if it fails after that.
        """
        llm, what = self._engine(), f"preparing for weights version {version}"
        if not self._residency.colocated:
            with self._changing(what, self._residency.drain(version)):
                await self._call("draining the engine", llm.pause_generation(mode="wait", clear_cache=True))
            return
        if self._residency.phase is Phase.SERVING:
            with self._changing(what, self._residency.sleep(version)):
                await self._fall_asleep()
        with self._changing(what, self._residency.wake(version)):
            await self._call("waking the weights", llm.wake_up(tags=["weights"]))

    async def receive(self, update: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Takes over the weights that `prepare` announced. update: the update_info of the receiver, `version` in it.

        Returns each worker's report (`WorkerCalls.weight_report`; none of a file). Any failure ends the engine.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, version = self._engine(), update["version"]
        request = WeightTransferUpdateRequest(update_info=dict(update))
        with self._changing(f"the update to weights version {version}", self._residency.sync(version)):
            await self._call("opening a weight update", llm.start_weight_update())
            await self._call("loading new weights", llm.update_weights(request))
            await self._call("ending a weight update", llm.finish_weight_update(weight_version=str(version)))
            versions = await self._call("reading the weight version", llm.collective_rpc("weight_version"))
            if any(found != version for found in versions):
                raise InfrastructureError(f"workers hold weights of versions {versions} instead of {version}")
            # The drain has emptied the cache; this fails if a block of the old weights is still in use.
            if not await self._call("resetting the prefix cache", llm.reset_prefix_cache()):
                raise InfrastructureError("the prefix cache still holds blocks of the old weights")
            if self._config.rollout.sync == "gather":
                return []
            return await self._call("reading the workers' reports", llm.collective_rpc("weight_report"))

    async def serve(self) -> None:
        """Answers requests again, with the weights that have been received."""
        llm = self._engine()
        with self._changing("going back to serving", self._residency.serve()):
            if not self._residency.colocated:
                await self._call("resuming the engine", llm.resume_generation())
            elif not await self._call("waking the cache", llm.wake_up(tags=["kv_cache"])):
                raise InfrastructureError("parts of the engine still sleep")

    async def receive_weights(self, path: str | Path, version: int) -> int:
        """A whole sync (rollout.sync=gather) from a safetensors file with every tensor by Hugging Face name.

        Returns the version that the workers hold. Raises as `prepare` does, and MegagentError with nothing changed if
        the file does not fit.
        """
        self._residency.require_newer(version)
        update = {"path": str(path), "version": version}
        problems = await self._call(
            "checking new weights", self._engine().collective_rpc("check_weights", kwargs=update)
        )
        for problem in problems:
            if problem is not None:
                raise MegagentError(problem)
        await self.prepare(version)
        await self.receive(update)
        await self.serve()
        return version

    async def abandon(self, reason: str) -> None:
        """Makes the engine unusable: a sync that it was part of has failed elsewhere."""
        self._fail(reason)

    async def close(self) -> None:
        """Ends all processes of the engine. May be called repeatedly, and after a failure."""
        self._residency.fail("it has been closed")
        self._expire()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would log the end of EngineCore as an error
            await asyncio.to_thread(llm.shutdown, CLOSE_TIMEOUT_S)
        kill(self._processes)
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def _initialize(self) -> None:
        """Waits until the workers answer, and have read the model's folder if whole files of weights will come."""
        if self._config.rollout.sync == "gather":
            await self.open_sync({})
        else:
            await self._engine().collective_rpc("weight_version")

    async def _fall_asleep(self) -> None:
        # Level 2: nothing is kept, as every element of every weight is about to be written.
        await self._call("falling asleep", self._engine().sleep(level=2, mode="wait"))

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
        self._residency.require_usable()
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
            if self._residency.failure is not None:
                raise self._unusable() from error
            if isinstance(error, TimeoutError):
                raise self._fail(f"{what} took longer than {self._timeout_s:g} s") from error
            if self._llm is not None and self._llm.errored:
                raise self._fail(f"vLLM's engine process died ({error})") from error
            raise InfrastructureError(f"{what} failed: {error}") from error

    async def _watch(self) -> None:
        """Notices the death of vLLM's processes, which vLLM does not report to every waiting call."""
        while self._residency.failure is None and self._llm is not None:
            if self._llm.errored:
                self._fail("vLLM's engine process died")
                return
            await asyncio.sleep(WATCH_PERIOD_S)

    @contextmanager
    def _changing(self, what: str, step: AbstractContextManager[None]) -> Iterator[None]:
        """A step of the engine's residency. What fails inside, even by being cancelled, ends the engine."""
        with step:
            try:
                yield
            except BaseException as error:
                failure = self._fail(f"{what} failed: {error!s}")
                if not isinstance(error, Exception):
                    raise
                raise failure from error

    def _fail(self, reason: str) -> InfrastructureError:
        """Marks the engine unusable, ends its processes and every wait. Returns the error; the first reason stays."""
        if self._residency.failure is None:
            self._residency.fail(reason)
            if self._llm is not None and self._llm.output_handler is not None:
                self._llm.output_handler.cancel()  # it would log the end of EngineCore as an error
            kill(self._processes)
            self._expire()
        return self._unusable()

    def _unusable(self) -> InfrastructureError:
        return InfrastructureError(f"the rollout engine is unusable: {self._residency.failure}; start a new one.")

    def _expire(self) -> None:
        for limit in self._waits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


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
