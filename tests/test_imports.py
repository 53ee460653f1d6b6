"""The import rules of the house, read from the source: nothing is imported, so nothing needs to be installed.

Imports inside functions count; those under `if TYPE_CHECKING` do not, as they never run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megagent"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 600  # lines

# How a module finds out whether there is a GPU. Everything else asks parallel/platform.py.
GPU_TESTS = re.compile(
    r"torch\.cuda\.(is_available|is_initialized)|torch\.accelerator\.(is_available|current_accelerator)"
    r"|torch\.backends\.cuda\.is_built|\bif\b.*device_count|device_count\(\) *[<>=!]|nvidia-smi|pynvml"
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, except the body of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield other
                yield from running_nodes(other)
            continue
        yield child
        yield from running_nodes(child)


@cache
def imports_of(module: str) -> frozenset[str]:
    """Absolute names that a module of the package imports; its own modules in full, others as written."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in running_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                member = f"{base}.{alias.name}"
                found.add(member if member in MODULES else base)
    return frozenset(found)


def reached_by(module: str) -> set[str]:
    """The package's modules that importing (and calling) this one can load, itself and parent packages included."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        parts = name.split(".")
        todo.extend(".".join(parts[:n]) for n in range(1, len(parts)))
        todo.extend(imports_of(name))
    return seen


def modules_under(*units: str) -> list[str]:
    return [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in units]


def offenders(modules: list[str], forbidden: set[str]) -> list[str]:
    """'module -> import' for every import that starts with a forbidden name."""
    return sorted(
        f"{module} -> {imported}"
        for module in modules
        for imported in imports_of(module)
        if any(imported == name or imported.startswith(name + ".") for name in forbidden)
    )


def foreign(module: str) -> set[str]:
    """Top-level names of what is imported from outside the package and the standard library."""
    tops = {imported.split(".")[0] for imported in imports_of(module)}
    return tops - set(sys.stdlib_module_names) - {"megagent"}


def own(module: str) -> set[str]:
    """Parts of the package (batch, algos, ...) that a module imports."""
    return {name.split(".")[1] for name in imports_of(module) if name.startswith("megagent.")}


@pytest.mark.parametrize("unit", ["algos", "envs"])
def test_algos_and_envs_reach_neither_ray_nor_megatron_nor_vllm(unit: str) -> None:
    reached = set().union(*(reached_by(module) for module in modules_under(unit)))
    assert offenders(sorted(reached), {"ray", "megatron", "vllm"}) == []


def test_algos_are_pure_torch_and_numpy() -> None:
    for module in modules_under("algos"):
        assert foreign(module) <= {"torch", "numpy"}, module
        assert own(module) <= {"algos", "batch", "errors"}, module


def test_batch_imports_tensors_only() -> None:
    assert foreign("megagent.batch") <= {"torch", "numpy", "tensordict"}
    assert own("megagent.batch") <= {"errors"}


def test_the_batch_arithmetic_needs_no_torch() -> None:
    """A configuration is checked and printed where torch is not installed."""
    for module in reached_by("megagent.algos.schedule"):
        assert foreign(module) == set(), module


def test_parallel_does_not_import_rollout_envs_or_vllm() -> None:
    # vLLM itself loads these.
    plugin = {f"megagent.parallel.reshard.{name}" for name in ("receiver", "file_receiver", "shard_receiver", "live")}
    modules = modules_under("parallel")
    assert offenders(modules, {"megagent.rollout", "megagent.envs"}) == []
    assert offenders([module for module in modules if module not in plugin], {"vllm", *plugin}) == []


def test_rollout_reaches_no_megatron() -> None:
    reached = set().union(*(reached_by(module) for module in modules_under("rollout")))
    assert offenders(sorted(reached), {"megatron"}) == []


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    edges = {unit.name: set() for unit in PACKAGE.iterdir() if (unit / "__init__.py").exists()}
    for module in MODULES:
        if module.count("."):
            unit = module.split(".")[1]
            edges.setdefault(unit, set()).update(own(module) - {unit})
    while free := [unit for unit, needs in edges.items() if not needs & set(edges)]:
        for unit in free:
            del edges[unit]
    assert edges == {}, "these import each other: " + ", ".join(f"{u} -> {sorted(n)}" for u, n in edges.items())


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_a_file_that_needs_a_table_of_contents_is_two_files(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def test_only_the_platform_file_looks_for_a_gpu() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in FILES
        if path != PACKAGE / "parallel" / "platform.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if GPU_TESTS.search(line)
    ]
    assert found == []


def test_the_rules_see_imports_inside_functions_and_not_those_for_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import ray\nelse:\n    import numpy\n"
        "def f():\n    from vllm.config import VllmConfig\n    from . import other\n"
    )
    path = tmp_path / "module.py"
    path.write_text(source)
    monkeypatch.setitem(MODULES, "megagent.sample.module", path)
    monkeypatch.setitem(MODULES, "megagent.sample.other", path)
    assert imports_of("megagent.sample.module") == {"typing", "numpy", "vllm.config", "megagent.sample.other"}
