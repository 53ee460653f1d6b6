"""The verbs of a run, on stand-ins for its processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megagent.config import Config
from megagent.observe.run_folder import RunFolder
from megagent.run import Run


class Exporter:
    """Stands in for the ranks: what it exports says how often it has been asked."""

    def __init__(self) -> None:
        self.calls = 0

    def export_hf(self, folder: Path) -> None:
        self.calls += 1
        folder.mkdir()
        (folder / "weights").write_text(str(self.calls))


@contextmanager
def no_phase(*_: Any) -> Iterator[None]:
    yield


def run_in(folder: RunFolder, config: Config) -> Run:
    absent: dict[str, Any] = dict.fromkeys(("world", "rollout", "collector", "bridge"))
    recorder: Any = SimpleNamespace(phase=no_phase)
    actor: Any = Exporter()
    return Run(config=config, folder=folder, recorder=recorder, actor=actor, **absent)


def test_weights_are_exported_every_export_freq_iterations_and_not_twice_at_the_end(tmp_path: Path) -> None:
    config = Config()
    config.trainer.run_dir, config.trainer.iterations = str(tmp_path / "run"), 6
    with RunFolder.create(config) as folder:
        run = run_in(folder, config)
        assert not any(run.exports(iteration) for iteration in range(1, 7))
        config.trainer.export_freq = 2
        assert [iteration for iteration in range(1, 7) if run.exports(iteration)] == [2, 4]


def test_an_export_on_the_way_has_a_folder_of_its_own_which_a_later_one_replaces(tmp_path: Path) -> None:
    config = Config()
    config.trainer.run_dir = str(tmp_path / "run")
    with RunFolder.create(config) as folder:
        run = run_in(folder, config)
        run.export(2)
        run.export(2)
        run.export()
        assert (folder.root / "exports" / "iteration_0000002" / "weights").read_text() == "2"
        assert (folder.root / "export" / "weights").read_text() == "3"
        assert not list(folder.root.glob(".export*"))
