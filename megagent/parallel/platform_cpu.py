"""The CPU platform: what Megatron's modules see in place of CUDA. Installed by platform.py, used by nobody else.

Megatron-Core assumes CUDA in about fifty places. Its modules are given a view of `torch` in which exactly what is
missing has a substitute; the rest of the process keeps the real torch.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def adjust(module: types.ModuleType, view: types.ModuleType) -> None:
    """Make one of Megatron's modules, just imported, ready for the CPU. view: torch as it shall see it."""
    names = vars(module)
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
    if module.__name__ == "megatron.core.transformer.moe.moe_utils":
        # How many tokens go to which expert: an array once it has come from the GPU, but here it never leaves.
        names["maybe_move_tensor_to_cpu"] = _as_it_comes_from_the_gpu
    if module.__name__ == "megatron.core.tensor_parallel.mappings":
        for name, uneven in (
            ("_gather_along_first_dim", _gather_uneven),
            ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
        ):
            names[name] = _for_uneven_parts(names[name], uneven)


def _as_it_comes_from_the_gpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # all_to_all_single takes the sizes of its parts as numbers, not as a tensor.
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _for_uneven_parts(even: Callable[..., Tensor], uneven: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Experts of several tensor ranks pass on as many tokens as were routed to each. Gloo moves equal parts only."""

    def move(tensor: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return even(tensor, group, sizes, use_global_buffer)
        return uneven(tensor, group, [int(size) for size in sizes])

    return move


def _gather_uneven(tensor: Tensor, group: Any, sizes: list[int]) -> Tensor:
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(tensor: Tensor, group: Any, sizes: list[int]) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return torch.split(total, sizes)[group.rank()].clone()


def substitute_on_tensors() -> None:
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


def torch_view() -> types.ModuleType:
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
