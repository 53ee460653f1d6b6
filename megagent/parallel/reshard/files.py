"""The layout of safetensors files: whole Hugging Face tensors, a file for a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megagent.parallel.reshard.boxes import Shape, whole
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import BYTES


def layout(files: Sequence[Mapping[str, tuple[str, Shape]]]) -> Layout:
    """What files hold. files: of each one, the name of every tensor -> (dtype, shape), as its header says."""
    tensors = {
        number: tuple(whole(name, shape, dtype) for name, (dtype, shape) in header.items())
        for number, header in enumerate(files)
    }
    return Layout(f"{len(files)} safetensors file{'' if len(files) == 1 else 's'}", tensors)


def sharded(
    hf_shapes: Mapping[str, Shape], dtype: str | Mapping[str, str], shard_bytes: int
) -> list[dict[str, tuple[str, Shape]]]:
    """The files that tensors go to in their order, each filled up to `shard_bytes` (one tensor may be more).

    dtype: of all tensors, or of each.
    """
    files: list[dict[str, tuple[str, Shape]]] = [{}]
    filled = 0
    for name, shape in hf_shapes.items():
        its_dtype = dtype if isinstance(dtype, str) else dtype[name]
        size = math.prod(shape) * BYTES[its_dtype]
        if files[-1] and filled + size > shard_bytes:
            files.append({})
            filled = 0
        files[-1][name] = (its_dtype, shape)
        filled += size
    return files
