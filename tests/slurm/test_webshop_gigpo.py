"""The job script on a real Slurm. A probe stands in for the training: it joins the job's Ray and says what it sees."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.slurm.conftest import ROOT, Job, Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two_nodes(slurm: Slurm) -> Job:
    """A job over two nodes that has succeeded."""
    job = slurm.submit("experiment=webshop_tiny", "trainer.seed=7", "test.stranger=yes", nodes=2)
    job.wait()
    return job


def test_a_job_over_two_nodes_succeeds(two_nodes: Job) -> None:
    assert two_nodes.fields["JobState"] == "COMPLETED", two_nodes.log


def test_all_nodes_join_one_ray(two_nodes: Job) -> None:
    assert two_nodes.probe["nodes"] == 2


def test_overrides_reach_the_training(two_nodes: Job) -> None:
    arguments = two_nodes.probe["arguments"]
    assert isinstance(arguments, list)
    assert arguments[0] == "train"
    assert {"experiment=webshop_tiny", "trainer.seed=7", "cluster.nodes=2"} <= set(arguments)


def test_users_overrides_come_last_so_that_they_win(two_nodes: Job) -> None:
    assert two_nodes.probe["arguments"][-2:] == ["trainer.seed=7", "test.stranger=yes"]  # type: ignore[index]


def test_only_the_owner_reads_the_token(two_nodes: Job) -> None:
    assert two_nodes.probe["token_mode"] == 0o600


def test_ray_refuses_another_token(two_nodes: Job) -> None:
    assert two_nodes.probe["stranger_is_refused"] is True


def test_success_leaves_nothing_behind(two_nodes: Job) -> None:
    assert two_nodes.leftovers() == []


def test_failure_ends_its_own_job_and_leaves_the_neighbour_running(slurm: Slurm) -> None:
    """Both jobs are on this machine, so one that stopped "all Ray processes" would end the other's too."""
    neighbour = slurm.submit("test.sleep=300", node="node1")
    leaked = neighbour.probe["leaked"]
    failing = slurm.submit("test.exit=3", node="node2")
    failing.wait()
    assert failing.fields["ExitCode"] == "3:0", failing.log
    assert failing.leftovers() == []
    assert neighbour.fields["JobState"] == "RUNNING", neighbour.log
    assert Path(f"/proc/{leaked}").exists()

    neighbour.cancel()
    neighbour.wait()
    assert neighbour.fields["JobState"] == "CANCELLED", neighbour.log
    assert neighbour.leftovers() == []


def test_end_of_ray_ends_the_job_with_a_sentence(slurm: Slurm) -> None:
    job = slurm.submit("test.sleep=300")
    assert job.probe
    raylets = [entry for entry in job.leftovers() if "/raylet/raylet " in entry]
    os.kill(int(raylets[0].split()[1].rstrip(":")), signal.SIGKILL)
    job.wait()
    assert job.fields["JobState"] == "FAILED"
    assert "ray_node: Ray ended on" in job.log, job.log
    assert job.leftovers() == []


def test_outside_a_job_the_script_says_how_to_start_it() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", "slurm/webshop_gigpo.sbatch"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "use sbatch slurm/webshop_gigpo.sbatch" in done.stderr
