"""The command line: what it prints, what it returns, and that it is quick to say no."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagent import __version__, cli
from megagent.cli import main
from megagent.errors import InfrastructureError

REPOSITORY = Path(__file__).parents[1]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "megagent train experiment=webshop_tiny" in capsys.readouterr().out


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"megagent {__version__}\n")


@pytest.mark.parametrize("command", ["train", "sft", "convert", "doctor"])
def test_every_command_has_a_help_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: megagent {command}" in capsys.readouterr().out


def test_cfg_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "experiment=webshop_tiny", "--cfg", "trainer.lr=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "  lr: 0.5\n" in printed
    assert "  run_dir: runs/webshop_tiny\n" in printed


@pytest.mark.parametrize("experiment", ["webshop_gigpo", "webshop_gigpo_7b"])
def test_dry_run_prints_layout_and_batch_table(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"experiment={experiment}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "tp 4 x pp 2 x dp 1" in printed or "tp 2 x pp 1 x dp 4" in printed
    assert "128 episodes x env.max_steps 15" in printed


@pytest.mark.parametrize("option", ["--dry-run", "--cfg"])
def test_faults_go_to_stderr_with_status_2(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", option, "algo.gama=1", "trainer.lr=abc"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "configs: 2 problems\n  algo.gama: unknown key (did you mean algo.gamma?)\n  trainer.lr=abc: must be a number\n"
    )


def test_an_override_written_as_an_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--trainer.lr=3", "--cfg"]) == 2
    assert "--trainer.lr=3: there is no such option; an override is written without dashes" in capsys.readouterr().err


def test_doctor_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "x=1"]) == 2
    assert "takes no arguments" in capsys.readouterr().err


@pytest.fixture
def startable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that pass every check: a known model's configuration with an empty file of weights."""
    import json

    from megagent.model_source import KNOWN

    (tmp_path / "config.json").write_text(json.dumps(dict(KNOWN["Qwen/Qwen2.5-0.5B"])))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    values = {"model.path": tmp_path, "trainer.run_dir": tmp_path / "run", "rollout.sync_dir": tmp_path}
    values["sft.output"] = tmp_path / "warm"
    return [f"{key}={value}" for key, value in values.items()]


def command_that(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException | None) -> list[object]:
    """Puts a module in the place of megagent.<name> whose main notes its config and raises `error`."""
    calls: list[object] = []

    def run(config: object) -> None:
        calls.append(config)
        if error is not None:
            raise error

    monkeypatch.setitem(sys.modules, f"megagent.{name}", SimpleNamespace(main=run))
    return calls


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_sound_command_is_run_with_its_configuration(
    command: str, startable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = command_that(monkeypatch, command, None)
    assert main([command, *startable, "trainer.seed=5"]) == 0
    assert [call.trainer.seed for call in calls] == [5]  # type: ignore[attr-defined]


def test_an_error_of_the_user_is_a_message_and_not_a_traceback(
    startable: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(monkeypatch, "train", InfrastructureError("rank 1 ended. Look at its log."))
    assert main(["train", *startable]) == 2
    assert capsys.readouterr().err == "rank 1 ended. Look at its log.\n"


def test_an_interrupt_ends_with_status_130(
    startable: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(monkeypatch, "train", KeyboardInterrupt())
    assert main(["train", *startable]) == 130
    assert capsys.readouterr().err == "megagent: interrupted\n"


def test_a_fault_of_ours_keeps_its_traceback(startable: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(monkeypatch, "train", ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train", *startable])


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize(
    "arguments", [["train", "--cfg"], ["train", "--dry-run"], ["train", "experiment=webshop_gigpo_7b", "--dry-run"]]
)
def test_looking_imports_nothing_heavy(arguments: list[str]) -> None:
    heavy = {"torch", "ray", "vllm", "megatron", "transformers"}
    code = f"import sys; from megagent.cli import main; main({arguments}); print(sorted({heavy} & set(sys.modules)))"
    assert run(code).stdout.endswith("[]\n")


@pytest.mark.parametrize("interrupts", ["default_int_handler", "SIG_IGN"], ids=["in front", "in the background"])
def test_termination_unwinds_like_an_interrupt(startable: list[str], interrupts: str) -> None:
    """Also where a script has started the command with &, which makes it ignore interrupts."""
    code = (
        "import os, signal, sys, types\nfrom megagent import cli\n"
        f"signal.signal(signal.SIGINT, signal.{interrupts})\n"
        "def main(config):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n    finally:\n        print('ended')\n"
        "sys.modules['megagent.train'] = types.SimpleNamespace(main=main)\n"
        f"sys.exit(cli.main({['train', *startable]!r}))"
    )
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (143, "ended\n")


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    command = f"{sys.executable} -m megagent train --cfg | true"
    ended = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=150)
    assert ended.stderr == ""


def test_doctor_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "python",
        "torch",
        "megatron-core",
        "vllm",
        "ray",
        "platform",
        "layers",
        "cores",
        "free memory",
        "/dev/shm",
    ):
        assert f"{line} " in printed


def test_a_missing_extra_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    assert main(["train", "experiment=webshop_tiny", f"trainer.run_dir={tmp_path / 'run'}"]) == 2
    assert "ray is not installed; install megagent[cpu] or megagent[gpu]" in capsys.readouterr().err


def test_a_module_that_megagent_itself_lacks_is_a_bug_and_shows_as_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'megagent.trian'", name="megagent.trian")

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    with pytest.raises(ModuleNotFoundError):
        main(["train", "experiment=webshop_tiny", f"trainer.run_dir={tmp_path / 'run'}"])
