"""What is shipped, and what the set-up says when something is missing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "locks").glob("cpu-py*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(path: Path) -> dict[str, str]:
    lines = [line.split("#")[0].split(";")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in (x.split("==") for x in lines if x)}


def names(requirements: list[str]) -> set[str]:
    return {re.sub("[-_.]+", "-", re.split(r"[^\w.-]", item)[0]).lower() for item in requirements}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=150)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_carries_every_configuration_file(wheel: zipfile.ZipFile) -> None:
    here = {f"megagent/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert here <= set(wheel.namelist())


def test_wheel_carries_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    here = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "megagent").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= set(wheel.namelist())


def test_wheel_carries_nothing_beside_the_package(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name} == {"megagent"}


def test_wheel_registers_the_command_and_the_vllm_receiver(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(next(name for name in wheel.namelist() if name.endswith("/entry_points.txt"))).decode()
    assert "megagent = megagent.cli:main" in text
    assert "[vllm.general_plugins]\nmegagent_receiver = megagent.parallel.reshard.receiver:register" in text


def needed_by(requirements: list[str], found: set[str]) -> set[str]:
    """Adds to `found` the distributions of the requirements and all that they need in turn, extras left out."""
    for name in names([item for item in requirements if "extra ==" not in item]) - found:
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another platform
            needed_by(metadata.requires(name) or [], found)
    return found


BLOCKER = """
import sys

class OnlyCore:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}: it is no core dependency", name=name)

sys.meta_path.insert(0, OnlyCore())
from megagent.cli import main
sys.exit(main(["train", "experiment=webshop_tiny", "--dry-run"]))
"""


def test_dry_run_needs_no_more_than_the_core_dependencies() -> None:
    core = needed_by(PROJECT["dependencies"], {"megagent"})
    blocked = {
        module
        for module, distributions in metadata.packages_distributions().items()
        if not any(re.sub("[-_.]+", "-", name).lower() in core for name in distributions)
    }
    assert {"torch", "ray"} <= blocked
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER.replace("BLOCKED", repr(blocked))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_pins_every_direct_dependency(lock: Path) -> None:
    extras = PROJECT["optional-dependencies"]
    assert names(PROJECT["dependencies"] + extras["cpu"] + extras["dev"]) <= set(pins(lock))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_leaves_out_what_vllm_names_but_nothing_imports(lock: Path) -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins(lock))


@pytest.mark.parametrize("lock", sorted((ROOT / "locks").glob("*.txt")), ids=lambda path: path.stem)
def test_lock_names_no_host(lock: Path) -> None:
    assert "://" not in lock.read_text(encoding="utf-8")


def test_each_python_has_a_lock_with_its_own_megatron() -> None:
    assert {lock.stem: pins(lock)["megatron-core"] for lock in LOCKS} == {"cpu-py311": "0.16.1", "cpu-py312": "0.19.2"}


def install(command: str, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("bash") or "bash", "locks/install.sh", command, python],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def fake_python(folder: Path, body: str) -> str:
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_missing_python_is_one_sentence() -> None:
    done = install("setup", "python-that-is-not-there")
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "PYTHON=python-that-is-not-there was not found" in done.stderr


def test_wrong_python_is_named_with_the_versions_that_work(tmp_path: Path) -> None:
    done = install("setup", fake_python(tmp_path, "echo 3.9"))
    assert done.returncode != 0
    assert "is Python 3.9, and megagent needs 3.11 or 3.12" in done.stderr


def test_without_any_python_the_names_that_were_tried_are_told(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    done = install("setup", "", PATH=str(tmp_path))
    assert done.returncode != 0
    assert "none of python3.11 python3.12 python3 on PATH is one" in done.stderr


def test_missing_venv_module_names_the_package(tmp_path: Path) -> None:
    python = fake_python(tmp_path, 'case "$2" in *venv*) exit 1;; *) echo 3.11;; esac')
    done = install("setup", python, VENV=str(tmp_path / "venv"))
    assert done.returncode != 0
    assert "has no venv module" in done.stderr
    assert "python3.11-venv" in done.stderr


def test_missing_compiler_is_one_sentence(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "cat", "sha256sum", "cut", "flock"):
        if found := shutil.which(tool):
            (tmp_path / tool).symlink_to(found)
    python = fake_python(tmp_path, "echo 3.11")
    done = install("setup", python, PATH=str(tmp_path), VENV=str(tmp_path / "venv"))
    assert done.returncode != 0
    assert "gcc is missing" in done.stderr


def test_full_disk_is_told_before_a_download(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\nprintf 'head\\ndev 9 8 1 99%% /\\n'\n", encoding="utf-8")
    (tools / "df").chmod(0o755)
    done = install("setup", sys.executable, PATH=f"{tools}:{os.environ['PATH']}", VENV=str(tmp_path / "venv"))
    assert done.returncode != 0
    assert "1 MB are free here" in done.stderr


def test_each_python_has_an_environment_of_its_own(tmp_path: Path) -> None:
    found = {install("where", fake_python(tmp_path, f"echo {version}")).stdout for version in ("3.11", "3.12")}
    assert found == {".venv\n", ".venv-3.12\n"}


def test_help_lists_every_target() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=150)
    assert targets == set(re.findall(r"^  ([a-z]+) ", done.stdout, re.MULTILINE))


def test_the_docs_have_no_places_left_to_fill_in() -> None:
    open_places = re.compile(r"@@\w+@@|\{[a-z_]+:[^}]*\}")
    found = {
        str(page.relative_to(ROOT)): places
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        if (places := [match[0] for match in open_places.finditer(page.read_text(encoding="utf-8"))])
    }
    assert found == {}
