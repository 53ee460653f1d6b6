"""What runs the tensors: CUDA with NCCL, or CPU with Gloo. The only file that knows about the difference.

`install()` must run before the first import of megatron, whose modules are adjusted as they are imported: for the CPU
(platform_cpu.py has the substitutes), and where the supported Megatron-Core versions (0.16, 0.19) differ or err.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import queue
import shutil
import sys
import sysconfig
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagent.errors import ConfigError
from megagent.parallel import platform_cpu

_MEGATRON = "megatron.core"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Platform:
    """kind: cpu or cuda; backend: of torch.distributed; device: of this process' tensors."""

    kind: str
    backend: str
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def host(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on the host, pinned on CUDA so that it comes back fast."""
        if not self.is_cuda:
            return tensor.detach().clone()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor.detach())

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; no copy if it is there already."""
        return tensor.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Kernels:
    """Which optional kernels are in use. spec: layer spec; grad_accumulation: weight gradients fused into matmuls;
    compiled: fused elementwise functions are; stream: sends and kernels run one after the other, as they were asked."""

    spec: str  # transformer_engine | local
    grad_accumulation: bool
    compiled: bool
    stream: bool

    def describe(self) -> str:
        fused = "fused weight gradients" if self.grad_accumulation else "plain weight gradients"
        compiled = ", compiled activations" if self.compiled else ""
        return f"{self.spec.replace('_', ' ')} layers, {fused}{compiled}"


_installed: Platform | None = None


def resolve(kind: str) -> str:
    """cpu or cuda for cpu, cuda or auto. Raises ConfigError if CUDA is asked for and absent."""
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError([f"cluster.platform={kind}: unknown platform; use auto, cpu or cuda"])
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise ConfigError(["cluster.platform=cuda: torch sees no CUDA device here; use cluster.platform=cpu or auto"])
    return ("cuda" if available else "cpu") if kind == "auto" else kind


def install(kind: str = "auto", threads: int = 1, local_rank: int = 0) -> Platform:
    """Make this process ready for Megatron, once; later calls return the same platform.

    threads: CPU only, of torch's own operators. local_rank: CUDA only, the device number among those visible.
    """
    global _installed
    if _installed is not None:
        return _installed
    kind = resolve(kind)
    _quieten()
    # Megatron's overlap of tensor-parallel communication with matmuls relies on a single hardware queue, and asks for
    # it even where there is none.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if kind == "cpu":
        platform_cpu.substitute_on_tensors()
    _adjust_megatron(platform_cpu.torch_view() if kind == "cpu" else torch)
    if kind == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        _installed = Platform("cuda", "nccl", device)
        return _installed
    torch.set_num_threads(max(1, threads))
    _installed = Platform("cpu", "gloo", _CPU)
    return _installed


def current() -> Platform:
    """The installed platform."""
    if _installed is None:
        raise RuntimeError("megagent.parallel.platform.install() must run before Megatron is used")
    return _installed


def kernels(kind: str) -> Kernels:
    """The optional kernels that a platform would use here. Imports nothing of them."""
    if kind != "cuda":
        return Kernels(spec="local", grad_accumulation=False, compiled=False, stream=False)
    spec = "transformer_engine" if _has("transformer_engine") else "local"
    fused = _has("fused_weight_gradient_mlp_cuda")
    return Kernels(spec=spec, grad_accumulation=fused, compiled=_has("triton") and _has_compiler(), stream=True)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _has_compiler() -> bool:
    """Whether Triton can build what starts its kernels: with CC, gcc or clang, against Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))


def prepare_group_environment(master: str) -> None:
    """Environment of the process group: Gloo asks the resolver for its own address unless told an interface."""
    if master in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _quieten() -> None:
    """Silence what Megatron repeats in every process although there is nothing to be done about it."""
    for pattern in (
        ".*Transformer Engine.*",
        ".*transformer_engine.*",
        ".*[Aa]pex.*",
        ".*nvidia-modelopt.*",
        ".*Failed to import.*",
        ".*full scope is deprecated.*",
        ".*Disabling sequence parallel.*",  # within experts of one tensor rank each, as asked
    ):
        warnings.filterwarnings("ignore", message=pattern, module=r"megatron\..*")
    # torch renames what Megatron calls; it warns in its own name.
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", message=f".*{name}. is deprecated.*", category=FutureWarning)
    # torch's checkpoints speak of single-process use where Megatron reads its own headers, and of Megatron's arguments.
    for message in (".*assuming the intent is to load in a single process.*", "The argument order of load has been.*"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    for logger, message in _IDLE_LOGS.items():
        logging.getLogger(f"{_MEGATRON}.{logger}").addFilter(_Without(message))


# What Megatron logs in every step or start: logger -> message.
_IDLE_LOGS = {
    # On CPU the tracker's generator IS the CPU generator, so that it changes inside the tracker is what is wanted.
    "tensor_parallel.random": "CPU RNG state changed",
    "models.gpt.gpt_model": "GPTModel IS DEPRECATED",  # 0.19; 0.16 has nothing else
    "distributed.distributed_data_parallel": "full_param_layout not provided",  # 0.19
    "dist_checkpointing.strategies.torch": "async save is deprecated",  # 0.19; nothing is saved asynchronously here
}


class _Without(logging.Filter):
    """Lets all but one message through."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def filter(self, record: logging.LogRecord) -> bool:
        return self.message not in record.getMessage()


# --- Megatron's modules, as they are imported -------------------------------------------------------------------------


def _adjust_megatron(view: types.ModuleType) -> None:
    """Adjust Megatron's modules, those already imported and those to come. view: torch as they shall see it."""
    sys.meta_path.insert(0, _MegatronFinder(view))
    for name, module in list(sys.modules.items()):
        if name.startswith(_MEGATRON):
            _adjust(module, view)


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Adjusts every module of Megatron as soon as its import ends."""

    def __init__(self, view: types.ModuleType) -> None:
        self.view = view

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_MEGATRON):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            _adjust(module, self.view)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _adjust(module: types.ModuleType, view: types.ModuleType) -> None:
    if module.__name__ == "megatron.core.dist_checkpointing.strategies.filesystem_async":
        _write_checkpoints_in_process(module)
    if module.__name__ == "megatron.core.optimizer.distrib_optimizer":
        _load_steps_of_torch_adam(module)
        _keep_padding_between_buckets(module)
    if module.__name__ == "megatron.core.transformer.moe.moe_utils" and not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # 0.16 asks whether it is None, and forgets to say so without Transformer Engine
    if view is not torch:
        platform_cpu.adjust(module, view)


def _write_checkpoints_in_process(module: types.ModuleType) -> None:
    """Checkpoint files are written by the rank itself.

    Both versions pass the results through a manager process, spawned although the results never leave this one; 0.16
    also forks a writer for each file. A fork of a process that has Gloo's or NCCL's threads can inherit a lock that
    nobody will release (seen: it hung), and what was spawned outlives a rank that is killed.
    """
    results: queue.Queue[Any] = queue.Queue()
    for name in ("_get_write_results_queue", "get_write_results_queue"):  # 0.16, 0.19
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: results)
    writer = module.FileSystemWriterAsync
    if not hasattr(writer, "write_preloaded_data_multiproc"):
        return  # 0.19 writes in threads

    def write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], out: queue.Queue[Any]) -> None:
        outcome: dict[int, Any] | Exception = {}
        for number, bucket in enumerate(buckets):
            written: queue.Queue[Any] = queue.Queue()
            pending: queue.Queue[Any] = queue.Queue()
            pending.put(number)
            writer.write_preloaded_data(transforms, number, bucket, written, pending, True, use_msc=use_msc)
            _, result = written.get_nowait()
            if isinstance(result, Exception):
                outcome = result
                break
            outcome[number] = result
        out.put(outcome)

    writer.write_preloaded_data_multiproc = staticmethod(write)


def _load_steps_of_torch_adam(module: types.ModuleType) -> None:
    """Loading a checkpoint into torch's Adam, where there is neither Transformer Engine nor Apex.

    torch keeps the step as a tensor of every parameter, Megatron's checkpoints once for all. In both versions the
    loader first gives all parameters ONE tensor, which each of them would then increment in every step, and next looks
    for a step in what was stored by parameter, where there is none.
    """
    load = module.DistributedOptimizer._set_main_param_and_optimizer_states

    def load_with_step(self: Any, model_param: Any, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()
            tensors = {"step": state["step"], **tensors}
        load(self, model_param, tensors)

    module.DistributedOptimizer._set_main_param_and_optimizer_states = load_with_step


def _keep_padding_between_buckets(module: types.ModuleType) -> None:
    """The optimizer's state, gathered to be stored by parameter, laid out as the places of the parameters assume.

    A buffer may have several buckets (a tied embedding has its own), each padded at its end. Megatron gathers them
    without the padding, and then looks for every parameter where it is with it: all after the first would be shifted.
    """
    gather = module.DistributedOptimizer.get_parameter_state_dp_zero

    def gather_padded(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = gather(self, *args, **kwargs)
        for number, buffer in enumerate(self.buffers):
            for tensors in (state or {}).get(number, {}).values():
                for key in [key for key, value in tensors.items() if isinstance(value, Tensor)]:
                    tensors[key] = _with_padding(tensors[key], buffer)
        return state

    module.DistributedOptimizer.get_parameter_state_dp_zero = gather_padded


def _with_padding(compact: Tensor, buffer: Any) -> Tensor:
    padded = compact.new_zeros(buffer.numel)
    position = 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[
            position : position + bucket.numel_unpadded
        ]
        position += bucket.numel_unpadded
    return padded
