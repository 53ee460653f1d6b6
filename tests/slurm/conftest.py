"""A real Slurm of two nodes on this machine, and jobs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.3)


@dataclass
class Job:
    number: str
    log_path: Path
    environment: dict[str, str]

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8") if self.log_path.exists() else ""

    @property
    def fields(self) -> dict[str, str]:
        """What `scontrol show job` says, for instance JobState and ExitCode (status:signal)."""
        return dict(
            item.split("=", 1) for item in self._run("scontrol", "show", "job", self.number).split() if "=" in item
        )

    @property
    def probe(self) -> dict[str, object]:
        """What tests/slurm/probe.py saw inside the job."""
        self.wait_for_log("probe: ")
        return json.loads(self.log.split("probe: ")[1].splitlines()[0])

    def wait_for_log(self, text: str, timeout_s: float = 300) -> None:
        def appeared() -> bool:
            assert text in self.log or self.fields["JobState"] not in FINISHED, self.log
            return text in self.log

        wait_for(f"{text!r} in the log of job {self.number}", appeared, timeout_s)

    def wait(self, timeout_s: float = 300) -> None:
        """Until the job and its steps have ended, on its nodes too."""
        wait_for(
            f"end of job {self.number}",
            lambda: (
                self.fields["JobState"] in FINISHED
                and self.number not in self._run("squeue", "--noheader", "-o%i").split()
            ),
            timeout_s,
        )

    def cancel(self) -> None:
        self._run("scancel", self.number)

    def leftovers(self) -> list[str]:
        """Processes and paths of the job that are still on this machine; the processes of its nodes are all here."""
        name = f"megagent-{self.number}"
        found = [str(path) for path in (Path("/tmp", name), Path("/dev/shm", name), ROOT / f".{name}") if path.exists()]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it ended, or is not ours
            if f"SLURM_JOB_ID={self.number}".encode() in environment or f"/tmp/{name}/" in command:
                found.append(f"process {process.name}: {command}")
        return found

    def _run(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=30
        ).stdout


@dataclass
class Slurm:
    folder: Path
    environment: dict[str, str]

    def submit(self, *overrides: str, nodes: int = 1, node: str = "", command: str = "probe") -> Job:
        """Submits the job script as a user would; command probe puts tests/slurm/probe.py in place of `megagent`."""
        environment = self.environment
        if command == "probe":
            environment = environment | {"PATH": f"{self.folder / 'bin'}:{environment['PATH']}"}
        options = ["--gpus-per-node=0", "--cpus-per-task=1", f"--nodes={nodes}", f"--output={self.folder}/job-%j.log"]
        if node:
            options.append(f"--nodelist={node}")
        number = subprocess.run(
            ["sbatch", "--parsable", *options, "slurm/webshop_gigpo.sbatch", *overrides],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.strip()
        return Job(number, self.folder / f"job-{number}.log", self.environment)


def install_slurm() -> None:
    """Installs Slurm's packages where that is possible, else skips and says why."""
    if all(shutil.which(command) for command in ("slurmctld", "slurmd", "sbatch", "munged")):
        if os.geteuid() != 0:
            pytest.skip("a private Slurm starts as root only")
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("Slurm is not installed, and only root on a machine with apt-get can install it here")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        try:
            done = subprocess.run(
                ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True, check=False, timeout=240
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"apt-get {command[0]} did not end within 240 s, so Slurm is not installed")
        if done.returncode != 0:
            pytest.skip(f"apt-get {command[0]} failed, so Slurm is not installed: {done.stderr.strip()[-200:]}")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    install_slurm()
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: it holds a socket
    launcher = folder / "bin" / "megagent"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("probe.py")}" "$@"\n')
    launcher.chmod(0o755)
    # The environment of this interpreter is the activated one, whatever its folder is called.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    subprocess.run(["slurm/local_slurm.sh", "start", str(folder)], cwd=ROOT, check=True, timeout=90)
    try:
        yield Slurm(folder, environment)
    finally:
        subprocess.run(["slurm/local_slurm.sh", "stop", str(folder)], cwd=ROOT, check=True, timeout=120)
