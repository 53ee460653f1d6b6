"""Conversions beside real processes: Megatron loads them, what a run trained becomes a model, kills are survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagent.config import Config
from megagent.parallel.convert import conversion, logits
from megagent.parallel.convert.conversion import Options
from megagent.parallel.degrees import Degrees
from tests.parallel import families, jobs
from tests.parallel.convert.folders import QUIET, plant, random_weights, read_folder, same, write_folder
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[3]
DENSE, MIXTURE = "qwen2", "qwen3_moe"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders; beside each one, under there/, what it is converted to."""
    found = {}
    for family in (DENSE, MIXTURE):
        folder = tmp_path_factory.mktemp(family)
        found[family] = families.write_model(folder / "model", family, num_attention_heads=8)
        # One of them has more padding in the file than on the ranks that load it.
        conversion.to_megatron(found[family], folder / "there", Degrees(tp=8 if family == DENSE else 1), QUIET)
    return found


def there(model: Path) -> Path:
    return model.parent / "there"


def loading_job(start: jobs.Start, configs: list[Config], checkpoints: list[str]) -> list[list[str]]:
    """For each configuration: the parameters that Megatron's own loader makes different from those of the folder."""
    from megatron.core import dist_checkpointing

    found = []
    for config, checkpoint in zip(configs, checkpoints, strict=True):
        stage = start(config).policy.stage
        expected = {
            name: parameter.detach().clone() for chunk in stage.chunks for name, parameter in chunk.named_parameters()
        }
        for parameter in stage.parameters():
            parameter.data.fill_(float("nan"))
        state = {"model": {str(n): chunk.sharded_state_dict() for n, chunk in enumerate(stage.chunks)}}
        loaded = dist_checkpointing.load(state, checkpoint, strict="raise_unexpected")["model"]
        for number, chunk in enumerate(stage.chunks):
            chunk.load_state_dict(loaded[str(number)])
        after = {name: parameter for chunk in stage.chunks for name, parameter in chunk.named_parameters()}
        found.append([name for name in expected if not torch.equal(expected[name], after[name])])
    return found


def test_megatron_loads_a_conversion_at_tp2_pp2(ranks: RankPool, models: dict[str, Path]) -> None:
    configs = [jobs.make_config(models[family], tp=2, pp=2) for family in models]
    for config in configs:
        config.parallel.sequence_parallel = True
    checkpoints = [str(there(model) / "release") for model in models.values()]
    results = ranks.run(loading_job, 4, configs=configs, checkpoints=checkpoints, starts=2)
    assert results == [[[], []]] * 4


def training_job(start: jobs.Start, config: Config, rows: Any, folder: str) -> dict[str, Tensor]:
    rank = start(config)
    rank.update(jobs.replica_part(rank, rows))
    rank.save(folder, 1)
    return jobs.weights_of(rank)


def test_a_training_runs_checkpoint_becomes_the_model_it_trained(
    ranks: RankPool, models: dict[str, Path], tmp_path: Path
) -> None:
    config = jobs.make_config(models[DENSE], tp=2, pp=2)
    trained = ranks.run(training_job, 4, config=config, rows=jobs.make_rows(), folder=str(tmp_path / "run"))[0]
    back = conversion.to_hf(tmp_path / "run", tmp_path / "back", models[DENSE], QUIET)
    assert same(read_folder(back), trained)
    assert not same(read_folder(models[DENSE]), trained)
    assert conversion.open_any(tmp_path / "run", models[DENSE]).notes[0].endswith("tensors of optimizer state")


def test_an_exported_models_logits_are_the_originals_in_transformers(models: dict[str, Path], tmp_path: Path) -> None:
    for model in models.values():
        back = conversion.to_hf(there(model), tmp_path / model.parent.name, None, QUIET)
        one, other = conversion.open_any(model), conversion.open_any(back)
        assert logits.largest_difference(one, other) <= 1e-5


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)


def test_logits_of_megatron_are_those_of_transformers(models: dict[str, Path]) -> None:
    # A process of its own: Megatron for the CPU is installed before Megatron is imported, and stays.
    code = "import sys; from megagent.cli import main; sys.exit(main(['convert', 'verify', *sys.argv[1:], '--logits']))"
    ended = run(code, models[MIXTURE], there(models[MIXTURE]))
    assert ended.returncode == 0, ended.stderr
    assert "(as rounding makes them)" in ended.stdout


def test_logits_are_not_worth_running_what_a_checkpoint_holds(models: dict[str, Path], tmp_path: Path) -> None:
    """PyTorch would unpickle the layers' own states, which are no tensors, with everything allowed."""
    checkpoint = conversion.to_megatron(models[DENSE], tmp_path / "there", Degrees(), QUIET)
    plant(checkpoint, tmp_path / "owned")
    code = "import sys; from megagent.cli import main; sys.exit(main(['convert', 'verify', *sys.argv[1:], '--logits']))"
    ended = run(code, models[DENSE], checkpoint)
    assert ended.returncode == 2
    assert "it holds more than tensors and plain values" in ended.stderr
    assert not (tmp_path / "owned").exists()


def test_several_processes_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion.copying, "TASK", 500)
    weights = random_weights("qwen3_moe")
    source = write_folder(tmp_path / "model", "qwen3_moe", weights)
    conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(workers=2, quiet=True))
    back = conversion.to_hf(tmp_path / "there", tmp_path / "back", None, Options(workers=2, dtype="fp32", quiet=True))
    assert same(read_folder(back), {name: tensor.float() for name, tensor in weights.items()})


KILLED = """
import os, signal, sys
from pathlib import Path
from megagent.parallel.convert import conversion, copying
from megagent.parallel.degrees import Degrees
copying.TASK, perform, left = 1, copying._perform, [5]
def dying(task):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    perform(task)
copying._perform = dying
conversion.to_megatron(Path(sys.argv[1]), Path(sys.argv[2]), Degrees(), conversion.Options(quiet=True))
"""


def test_a_killed_conversion_leaves_nothing_that_looks_finished_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights("qwen2")
    source = write_folder(tmp_path / "model", "qwen2", weights)
    assert run(KILLED, source, tmp_path / "there").returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".there.partial", "model"]
    monkeypatch.setattr(conversion.copying, "TASK", 1)
    done: list[int] = []
    perform = conversion.copying._perform
    monkeypatch.setattr(conversion.copying, "_perform", lambda task: (done.append(task.size), perform(task)))
    conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(resume=True, quiet=True))
    stored = conversion.open_any(tmp_path / "there")
    total = sum(extent.size for extent in stored.extents.values())
    assert 0 < sum(done) < total
    assert same(read_folder(conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)), weights)


MEMORY = """
import sys
from pathlib import Path
import torch
from megagent.parallel.convert import conversion
from megagent.parallel.degrees import Degrees
def memory(kind):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))
idle = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
conversion.to_megatron(Path(sys.argv[1]), Path(sys.argv[2]), Degrees(), conversion.Options(quiet=True, dtype="bf16"))
print(memory("VmHWM") - idle)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 0.6 GB without any bytes on the disk, cast to half of that: holding it would be seen."""
    import json
    import math

    from megagent.parallel.convert import hf_folder
    from tests.parallel.models.configs import TINY, tiny

    sizes = {"num_hidden_layers": 68, "hidden_size": 512, "intermediate_size": 1024}
    shapes = tiny("llama", **sizes).hf_shapes()
    (tmp_path / "model").mkdir()
    _, _, size = hf_folder.lay_out(tmp_path / "model", shapes, dict.fromkeys(shapes, "F32"), 1 << 40)
    (tmp_path / "model" / "config.json").write_text(json.dumps({**TINY["llama"], **sizes}))
    largest = max(map(math.prod, shapes.values())) * 4
    ended = run(MEMORY, tmp_path / "model", tmp_path / "there")
    assert ended.returncode == 0, ended.stderr
    assert largest + (512 << 20) < size
    assert int(ended.stdout) < largest + (512 << 20)
