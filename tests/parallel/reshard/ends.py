"""Both ends of a weight sync as real processes: Megatron ranks that stay and answer, and a plain vLLM `LLM`."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megagent.config import Config
from megagent.parallel.reshard.receiver import WorkerCalls
from megagent.parallel.reshard.spec import SyncPlan
from megagent.parallel.reshard.vllm import Workers
from tests.parallel.pool import JobFailed, RankPool, free_ports

SECONDS = 300.0  # the deadline of every single wait: generous, the machine may be busy
Call = str | Callable[..., Any]
UNBOUNDED = 1e6  # of the job as a whole; its calls have deadlines

# --- Megatron ---------------------------------------------------------------------------------------------------------


class Trainers:
    """The ranks of a configuration, alive between calls. A call is made on all of them at once.

    A call is the name of a method of megagent.parallel.rank.Rank, or a function of some module that takes a Rank.
    """

    def __init__(self, pool: RankPool, config: Config, trains: bool = True) -> None:
        """trains: False leaves out the optimizer and the reference, for a model whose training would not fit here."""
        parallel = config.parallel
        self.world = parallel.tp * parallel.pp * parallel.dp
        pairs = [multiprocessing.Pipe() for _ in range(self.world)]
        self._connections: list[Connection] = [mine for mine, _ in pairs]
        self._failure: JobFailed | None = None
        arguments = {"config": config, "trains": trains, "ends": [theirs for _, theirs in pairs]}
        self._thread = threading.Thread(target=self._run, args=(pool, arguments), daemon=True)
        self._thread.start()
        self.answers()  # that all have been set up

    def call(self, what: Call, *arguments: Any) -> list[Any]:
        """What each rank answers, by rank. Raises JobFailed if one raises or dies."""
        self.ask(what, *arguments)
        return self.answers()

    def ask(self, what: Call | None, *arguments: Any) -> None:
        """Begin a call, for `answers` to wait for."""
        for connection in self._connections:
            connection.send((what, arguments))

    def answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + SECONDS
        while len(found) < self.world:
            waiting = {self._connections[rank]: rank for rank in range(self.world) if rank not in found}
            for connection in wait(list(waiting), timeout=0.5):
                found[waiting[connection]] = connection.recv()  # type: ignore[index, union-attr]
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise JobFailed(f"ranks {sorted(waiting.values())} did not answer within {SECONDS:.0f} s")
        return [found[rank] for rank in range(self.world)]

    def close(self) -> None:
        if self._thread.is_alive():
            self.ask(None)
            self._thread.join(SECONDS)
        for connection in self._connections:
            connection.close()

    def _run(self, pool: RankPool, arguments: dict[str, Any]) -> None:
        try:
            pool.run(serve, self.world, starts=1, seconds=UNBOUNDED, **arguments)
        except JobFailed as error:
            self._failure = error


def serve(start: Any, config: Config, trains: bool, ends: list[Connection]) -> None:
    """A job: answer calls until there is none."""
    from megagent.parallel import optimizer, policy

    with contextlib.ExitStack() as stack:
        if not trains:
            stack.enter_context(mock.patch.object(optimizer, "build"))
            stack.enter_context(mock.patch.object(policy, "Policy", lambda *given: SimpleNamespace(stage=given[2])))
        rank = start(config)
    for number, end in enumerate(ends):
        if number != rank.rank:
            end.close()
    mine = ends[rank.rank]
    mine.send(None)
    while True:
        what, arguments = mine.recv()
        if what is None:
            return
        mine.send(getattr(rank, what)(*arguments) if isinstance(what, str) else what(rank, *arguments))


def scale(rank: Any, factor: float) -> None:
    """Other weights, the same ones in every layout: all of them times `factor`."""
    from megagent.parallel import hf_io

    with torch.no_grad():
        for parameter in hf_io.stage_parameters(rank.policy.stage).values():
            parameter.mul_(factor)


# --- vLLM -------------------------------------------------------------------------------------------------------------


class Recorder(WorkerCalls):
    """What a worker's parameters were, bit by bit, before vLLM packed them for its kernels, and how long packing took.

    Both the layerwise reload of whole tensors and the receiver of shards give each layer to its own
    process_weights_after_loading once it is complete.
    """

    model_runner: Any
    vllm_config: Any
    device: Any

    def record(self, digests: bool) -> None:
        """Look on from now on; digests: take them too, which takes time."""
        from vllm.distributed.parallel_state import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # vLLM 0.32 makes them in a first run without work, which it leaves out on CPUs.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=self.device
            )
        self.takes_digests = digests
        self.digests: dict[str, str] = {}
        self.packing_s = 0.0
        for name, module in self.model_runner.model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None and "process_weights_after_loading" not in vars(method):
                self._look_on(name, method)

    def _look_on(self, name: str, method: Any) -> None:
        pack = method.process_weights_after_loading

        def packed(layer: Any) -> None:
            start = time.perf_counter()
            if self.takes_digests:
                self.digests |= {
                    f"{name}.{part}": digest(parameter) for part, parameter in layer.named_parameters(recurse=False)
                }
            pack(layer)
            self.packing_s += time.perf_counter() - start

        method.process_weights_after_loading = packed

    def shards(self) -> dict[str, str]:
        """Name of each parameter -> digest of its bits. What has been recorded is forgotten."""
        found = {
            name: digest(parameter)
            for name, parameter in self.model_runner.model.named_parameters()
            if parameter.numel()
        }
        found |= self.digests
        self.digests = {}
        return found

    def load_golden(self, path: str, version: int) -> tuple[float, float]:
        """The weights of a file with whole tensors, by the way that vLLM loads a checkpoint.

        Returns the seconds until they stood in the layers, and those of packing them.
        """
        from vllm.config import set_current_vllm_config

        from megagent.parallel.reshard.file_receiver import FileReceiver

        with set_current_vllm_config(self.vllm_config):
            golden = FileReceiver(None, self.vllm_config, self.device, self.model_runner.model)
            self.packing_s, start = 0.0, time.perf_counter()
            golden.start_weight_update()
            golden.update_weights({"path": path, "version": version})
            golden.finish_weight_update()
        return time.perf_counter() - start - self.packing_s, self.packing_s


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Engine:
    """A vLLM `LLM` as anybody would make it, with this package's backend and the recorder."""

    def __init__(
        self,
        folder: Path,
        workers: Workers,
        dtype: str = "float32",
        recorder: type[Recorder] = Recorder,
        digests: bool = True,
    ) -> None:
        for name, value in {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
            "MEGAGENT_ENGINE_OWNER": str(os.getpid()),
        }.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        from vllm import LLM

        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            tensor_parallel_size=workers.tp,
            pipeline_parallel_size=workers.pp,
            enable_expert_parallel=workers.expert_parallel,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,
            enable_prefix_caching=False,
            distributed_executor_backend="mp",
            disable_log_stats=True,
            weight_transfer_config={"backend": "megagent"},
            worker_extension_cls=f"{recorder.__module__}.{recorder.__qualname__}",
        )
        self.call("record", digests)

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """What each worker answers."""
        return self.llm.collective_rpc(name, timeout=SECONDS, args=arguments)

    def log_probs(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
        """Greedy responses: token ids, and the log-probability of each."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        found = []
        for output in outputs:
            ids = list(output.outputs[0].token_ids)
            found.append(
                (ids, [entry[token].logprob for token, entry in zip(ids, output.outputs[0].logprobs, strict=True)])
            )
        return found

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


# --- a sync -----------------------------------------------------------------------------------------------------------


class Link:
    """Trainers and an engine that have agreed on a plan."""

    def __init__(self, trainers: Trainers, engine: Engine, made: SyncPlan, transport: str) -> None:
        self.trainers, self.engine = trainers, engine
        rendezvous = ["127.0.0.1", free_ports(1)[0]] if transport in ("gloo", "nccl") else None
        spec = made.spec.as_json()
        trainers.ask("open_sync", spec, transport, rendezvous)
        init = {"spec": spec, "engine": 0, "transport": transport, "digest": made.digest, "rendezvous": rendezvous}
        engine.llm.init_weight_transfer_engine({"init_info": init})
        self.digests = trainers.answers()

    def sync(self, version: int, checksums: bool = False) -> list[Mapping[str, Any]]:
        """Move the trainers' weights; what each worker reports."""
        offers = dict(enumerate(self.trainers.call("offer_weights", version)))
        self.trainers.ask("send_weights", version)
        self.engine.llm.start_weight_update()
        update = {"version": version, "offers": offers, "checksums": checksums}
        self.engine.llm.update_weights({"update_info": update})
        self.engine.llm.finish_weight_update(weight_version=str(version))
        self.trainers.answers()
        return self.engine.call("weight_report")
