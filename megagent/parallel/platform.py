"""What runs the tensors: CUDA with NCCL, or CPU with Gloo. The only file that knows about the difference.

Megatron-Core assumes CUDA in about fifty places. On CPU its modules are given a view of `torch` in which exactly what
is missing has a substitute; the rest of the process keeps the real torch. `install()` must run before the first
import of megatron. Differences between the supported Megatron-Core versions (0.16, 0.19) are settled here too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import queue
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagent.errors import ConfigError

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
    """Which optional kernels are in use. spec: layer spec; grad_accumulation: weight gradients fused into matmuls."""

    spec: str  # transformer_engine | local
    grad_accumulation: bool
    norm: str  # apex | torch, where the local spec is used

    def describe(self) -> str:
        fused = "fused weight gradients" if self.grad_accumulation else "plain weight gradients"
        norm = "" if self.spec == "transformer_engine" else f", {self.norm} norms"
        return f"{self.spec.replace('_', ' ')} layers{norm}, {fused}"


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
    if kind == "cpu":
        _substitute_on_tensors()
    _adjust_megatron(_torch_view() if kind == "cpu" else torch)
    if kind == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Megatron's overlap of tensor-parallel communication with matmuls relies on a single hardware queue.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
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
        return Kernels(spec="local", grad_accumulation=False, norm="torch")
    spec = "transformer_engine" if _has("transformer_engine") else "local"
    return Kernels(spec=spec, grad_accumulation=_has("fused_weight_gradient_mlp_cuda"), norm=_norm())


def _norm() -> str:
    return "apex" if _has("apex") else "torch"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


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
    names = vars(module)
    if module.__name__ == "megatron.core.dist_checkpointing.strategies.filesystem_async":
        _write_checkpoints_in_process(module)
    if module.__name__ == "megatron.core.optimizer.distrib_optimizer":
        _load_steps_of_torch_adam(module)
    if view is torch:
        return
    if names.get("torch") is torch:
        names["torch"] = view
    if module.__name__ == "megatron.core.jit":
        # torch.compile as Megatron's fuser costs a C++ compilation per process and gains nothing on tiny models. The
        # fused modules decorate at import, so it is switched off before any of them can be imported.
        module.disable_jit_fuser()
    if module.__name__ == "megatron.core.tensor_parallel.random":
        # Written against the CUDA generators' internals. On CPU both kinds of state are the one generator's.
        names["_get_cuda_rng_state"] = _get_rng_state
        names["_set_cuda_rng_state"] = _set_rng_state


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


# --- CPU --------------------------------------------------------------------------------------------------------------


def _substitute_on_tensors() -> None:
    # Tied embeddings over pipeline stages and a few others call .cuda() on tensors that are where they belong.
    torch.Tensor.cuda = _identity  # type: ignore[method-assign, assignment]
    # The optimizers sort parameters and check gradients by the NAME of their type, e.g. torch.cuda.FloatTensor.
    torch.Tensor.type = _type_named_as_cuda(torch.Tensor.type)  # type: ignore[method-assign, assignment]


def _identity(self: Tensor, *_: Any, **__: Any) -> Tensor:
    return self


def _type_named_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _torch_view() -> types.ModuleType:
    """torch as Megatron shall see it on CPU: the same objects but for the substitutes below."""
    view = _copy_of(torch)
    for name in ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"):
        setattr(view, name, _made_on_cpu(getattr(torch, name)))
    for name in ("zeros_like", "ones_like", "empty_like", "full_like"):
        setattr(view, name, _made_on_cpu(getattr(torch, name)))
    view.cuda = _cuda_view()  # type: ignore[attr-defined]
    return view


def _copy_of(module: types.ModuleType) -> types.ModuleType:
    # A copy of the names, not a forwarding object: looking one up then costs what it costs in the real module.
    view = types.ModuleType(module.__name__, module.__doc__)
    vars(view).update(vars(module))
    # torch loads some submodules when they are first asked for.
    view.__getattr__ = lambda name: getattr(module, name)  # type: ignore[method-assign]
    return view


def _made_on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """device="cuda" in a tensor factory read as cpu."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _cuda_view() -> types.ModuleType:
    view = _copy_of(torch.cuda)
    substitutes: dict[str, Any] = {
        # Used as `device=` everywhere: the CPU device is a valid answer there.
        "current_device": lambda: _CPU,
        "set_device": _nothing,
        # Everything is synchronous.
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        # 0.19 asks for the current stream in its gradient sync, 0.16 for the default one.
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        # The RNG tracker: see _get_rng_state.
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": torch.manual_seed,
        # 0.19 logs memory and capability in places that are reached without a GPU.
        "get_device_capability": lambda device=None: (0, 0),
        "is_current_stream_capturing": lambda: False,
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_range),
    }
    vars(view).update(substitutes)
    return view


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def _no_range(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _Event:
    """A CUDA event where everything is synchronous: it has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _Stream:
    """A CUDA stream where everything is synchronous: waiting for it is nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


_STREAM = _Stream()
