"""Loading what others have pickled, without running what it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def weights_only() -> Iterator[None]:
    """Every torch.load inside takes tensors and plain values only, also those that Megatron and PyTorch's distributed
    checkpoints make by themselves: they unpickle the layers' own states without asking what they are."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE) if before is None else os.environ.update({_VARIABLE: before})
