"""A checkpoint on disk, of either kind: its model, its layout, and where each tensor's bytes lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megagent.parallel.models import Architecture
from megagent.parallel.reshard import files
from megagent.parallel.reshard.boxes import Shape
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import BYTES, Plan, make_plan

Kind = Literal["Hugging Face", "Megatron"]
# --dtype -> as safetensors writes it, and as config.json does.
DTYPES = {"bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16"), "fp32": ("F32", "float32")}


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a contiguous tensor in a file, from `offset` on."""

    path: str
    offset: int
    dtype: str
    shape: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


Extents = Mapping[tuple[int, str], Extent]  # (rank or number of a file, name of its tensor in the layout)


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose tensors have been checked against its config.json.

    companions: the folder of config.json, tokenizer and the like. notes: what else is in it, for people.
    """

    kind: Kind
    folder: Path
    companions: Path
    hf_config: Mapping[str, Any]
    architecture: Architecture
    layout: Layout
    extents: Extents
    notes: tuple[str, ...] = ()

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of every Hugging Face tensor, by name, in the model's order."""
        found = {
            box.hf: tensor.dtype
            for tensors in self.layout.tensors.values()
            for tensor in tensors
            if not tensor.copy
            for box in tensor.boxes
        }
        return {name: found[name] for name in self.architecture.hf_shapes()}

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.architecture.hf_shapes().values())

    def whole(self) -> Plan:
        """How each Hugging Face tensor is put together, in its own dtype."""
        dtypes = self.dtypes
        target = files.layout([{name: (dtypes[name], shape) for name, shape in self.architecture.hf_shapes().items()}])
        return make_plan(self.layout, target)
