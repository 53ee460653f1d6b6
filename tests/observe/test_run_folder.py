from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megagent.config import Config, as_yaml
from megagent.envs.webshop.config import WebShopConfig
from megagent.errors import ConfigError, MegagentError
from megagent.observe.files import write_whole
from megagent.observe.run_folder import RunFolder, holds_run


def config_in(root: Path, resume: bool = False) -> Config:
    config = Config()
    config.trainer.run_dir, config.trainer.resume = str(root), resume
    return config


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_new_folder_holds_the_resolved_configuration(tmp_path: Path) -> None:
    config = config_in(tmp_path / "deep" / "run")
    with RunFolder.create(config) as folder:
        assert (folder.root / "config.yaml").read_text() == as_yaml(config)


def test_a_new_folder_can_take_checkpoints_and_episodes(tmp_path: Path) -> None:
    with RunFolder.create(config_in(tmp_path / "run")) as folder:
        assert folder.checkpoints.is_dir()
        assert folder.episodes.is_dir()


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    RunFolder.create(config_in(tmp_path)).close()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"already holds a run; continue it with trainer\.resume=true"):
        RunFolder.create(config_in(tmp_path))
    assert contents(tmp_path) == before


def test_a_refused_folder_can_be_resumed_at_once(tmp_path: Path) -> None:
    RunFolder.create(config_in(tmp_path)).close()
    with pytest.raises(ConfigError):
        RunFolder.create(config_in(tmp_path))
    RunFolder.create(config_in(tmp_path, resume=True)).close()


def test_a_resume_truncates_nothing(tmp_path: Path) -> None:
    RunFolder.create(config_in(tmp_path)).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints" / "latest").write_text("iteration_0000007\n")
    with RunFolder.create(config_in(tmp_path, resume=True)) as folder:
        assert folder.metrics.read_text() == '{"step": 1}\n'
        assert folder.finished_iterations == 7


def test_a_resume_of_nothing_starts_a_run(tmp_path: Path) -> None:
    """A job that Slurm requeues passes the same command, also the first time."""
    with RunFolder.create(config_in(tmp_path / "run", resume=True)) as folder:
        assert folder.finished_iterations == 0


def test_a_folder_with_other_things_in_it_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(config_in(tmp_path)).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_second_process_in_the_same_folder_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    code = (
        "import sys; from megagent.config import Config; from megagent.observe.run_folder import RunFolder\n"
        "config = Config(); config.trainer.run_dir = sys.argv[1]; config.trainer.resume = True\n"
        "folder = RunFolder.create(config); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(MegagentError, match=rf"process {holder.pid} on \S+ is running in this folder"):
            RunFolder.create(config_in(tmp_path, resume=True))
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    RunFolder.create(config_in(tmp_path, resume=True)).close()  # a killed process leaves no lock behind


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MegagentError, match=r"trainer\.run_dir=.*cannot be written"):
        RunFolder.create(config_in(tmp_path / "file" / "run"))


@pytest.mark.parametrize(("name", "holds"), [("config.yaml", True), ("metrics.jsonl", True), ("notes.txt", False)])
def test_what_makes_a_folder_a_run(tmp_path: Path, name: str, holds: bool) -> None:
    (tmp_path / name).touch()
    assert holds_run(tmp_path) is holds


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert contents(tmp_path) == {"config.yaml": b"old"}


def test_the_folder_says_which_world_it_was(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    config.env = WebShopConfig(compat="verl_agent")
    RunFolder.create(config, digest="abc").close()
    world = json.loads((tmp_path / "world.json").read_text())
    assert world["digest"] == "abc"
    assert (world["env"]["name"], world["env"]["catalog"], world["env"]["compat"]) == (
        "webshop",
        "embedded",
        "verl_agent",
    )


def test_a_run_is_not_continued_with_other_tasks_and_is_left_as_it_was(tmp_path: Path) -> None:
    config = config_in(tmp_path, resume=True)
    config.env = WebShopConfig(compat="verl_agent")
    RunFolder.create(config, digest="abc").close()
    before = contents(tmp_path)
    config.env = WebShopConfig()
    with pytest.raises(ConfigError, match="the run there had other tasks; continue it with env.compat=verl_agent"):
        RunFolder.create(config, digest="def")
    config.env = WebShopConfig(compat="verl_agent")
    with pytest.raises(ConfigError, match="the run there had other tasks; give it the products that it had"):
        RunFolder.create(config, digest="ghi")
    assert {name: text for name, text in contents(tmp_path).items() if name != ".lock"} == {
        name: text for name, text in before.items() if name != ".lock"
    }
    RunFolder.create(config, digest="abc").close()
