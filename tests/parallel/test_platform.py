"""The CPU platform: Megatron sees substitutes, everybody else the real torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megagent.errors import ConfigError
from megagent.parallel import platform
from tests.parallel import jobs
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow


def views_job(start: jobs.Start) -> dict[str, Any]:
    from megatron.core import jit
    from megatron.core.pipeline_parallel import schedules

    return {
        "kind": platform.current().kind,
        "megatron_sees_cpu": schedules.torch.zeros(2, device="cuda").device.type,
        "current_device": str(schedules.torch.cuda.current_device()),
        "same_tensor_class": schedules.torch.Tensor is torch.Tensor,
        "torch_is_untouched": torch.zeros.__module__ != platform.__name__,
        "fuser": jit.jit_fuser is jit.noop_decorator,
        "left_over": [
            name
            for name, module in sys.modules.items()
            if name.startswith("megatron.core") and getattr(module, "torch", None) is torch
        ],
    }


def test_megatron_alone_sees_the_substitutes(ranks: RankPool) -> None:
    assert ranks.run(views_job, 1)[0] == {
        "kind": "cpu",
        "megatron_sees_cpu": "cpu",
        "current_device": "cpu",
        "same_tensor_class": True,
        "torch_is_untouched": True,
        "fuser": True,
        "left_over": [],
    }


def test_the_rank_module_can_be_imported_without_megatron() -> None:
    program = "import sys, megagent.parallel.rank; sys.exit(any(n.startswith('megatron') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_cuda_without_a_device_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cluster.platform=cuda"):
        platform.resolve("cuda")


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert platform.resolve("auto") == kind


def test_the_description_names_the_kernels() -> None:
    assert platform.kernels("cpu").describe() == "local layers, plain weight gradients"


def test_activations_are_compiled_only_where_triton_can_build_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_has", lambda module: module == "triton")
    monkeypatch.setattr(platform.os.path, "exists", lambda path: str(path).endswith("Python.h"))
    for compiler in ("gcc", "clang", None):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(platform.shutil, "which", lambda name, found=compiler: name if name == found else None)
        assert platform.kernels("cuda").compiled == (compiler is not None)
